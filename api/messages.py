"""Messages and tools of a chat: checked, and messages brought to one form (roles, content as one string)."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from api.errors import ApiError, invalid
from api.fields import Object, array, boolean, check_integers, mapping, string
from wire.limits import Limits

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_SCHEMA_BYTES = 64 << 10
MAX_TOOL_CALLS = 1024  # in one message


def parse_messages(source: Object, limits: Limits) -> list[dict[str, Any]]:
    """`messages` in one form: role, content as a string, and where given name, tool_calls, tool_call_id, reasoning."""
    found = array(source, "messages", limits.max_messages)
    if not found:
        raise invalid("messages", "messages must be an array with at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(found)]


def _message(message: Any, param: str) -> dict[str, Any]:
    if type(message) is not dict:
        raise invalid(param, f"{param} must be an object")
    given = message.get("role")
    role = ROLES.get(given) if type(given) is str else None
    if role is None:
        raise invalid(f"{param}.role", f"{param}.role must be one of {', '.join(ROLES)}")
    out: dict[str, Any] = {"role": role}
    if (name := string(message, "name", f"{param}.name")) is not None:
        out["name"] = name
    calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    if role == "assistant":
        calls = _tool_calls(message, param)
        reasoning = string(message, "reasoning_content", f"{param}.reasoning_content")
    content = _content(message.get("content"), f"{param}.content")
    if content is None:
        if calls is None and reasoning is None:
            raise invalid(f"{param}.content", f"{param}.content must be a string or an array of text parts")
        content = ""
    out["content"] = content
    if reasoning is not None:
        out["reasoning_content"] = reasoning
    if calls is not None:
        out["tool_calls"] = calls
    if role == "tool" and (call := string(message, "tool_call_id", f"{param}.tool_call_id")) is not None:
        out["tool_call_id"] = call
    return out


def _content(content: Any, param: str) -> str | None:
    if content is None or type(content) is str:
        return content
    if type(content) is not list:
        raise invalid(param, f"{param} must be a string or an array of text parts")
    return "".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if type(part) is not dict:
        raise invalid(param, f"{param} must be an object")
    kind = part.get("type")
    if type(kind) is not str:
        raise invalid(f"{param}.type", f"{param}.type must be a string")
    if kind != "text":
        raise invalid(f"{param}.type", "only text parts are supported", "unsupported_content_type")
    text = part.get("text")
    if type(text) is not str:
        raise invalid(f"{param}.text", f"{param}.text must be a string")
    return text


def _tool_calls(message: Object, param: str) -> list[dict[str, Any]] | None:
    param += ".tool_calls"
    calls = array(message, "tool_calls", MAX_TOOL_CALLS, param)
    return [_tool_call(call, f"{param}[{index}]") for index, call in enumerate(calls)] if calls else None


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    if type(call) is not dict:
        raise invalid(param, f"{param} must be an object")
    _check_type(call, param)
    function = mapping(call, "function", f"{param}.function")
    if function is None:
        raise invalid(f"{param}.function", f"{param}.function is required")
    name = _tool_name(function, f"{param}.function.name")
    arguments = string(function, "arguments", f"{param}.function.arguments")
    if arguments is None:
        raise invalid(f"{param}.function.arguments", f"{param}.function.arguments must be a string of JSON")
    out = {"type": "function", "function": {"name": name, "arguments": arguments}}
    identity = string(call, "id", f"{param}.id")
    return out if identity is None else {"id": identity, **out}


def _check_type(source: Object, param: str) -> None:
    kind = string(source, "type", f"{param}.type")
    if kind not in (None, "function"):
        raise invalid(f"{param}.type", f'{param}.type must be "function"')


def _tool_name(function: Object, param: str) -> str:
    name = function.get("name")
    if type(name) is not str or not TOOL_NAME.fullmatch(name):
        raise invalid(param, f"{param} must be 1 to 64 letters, digits, _ or -")
    return name


def parse_tools(source: Object, limits: Limits) -> list[dict[str, Any]] | None:
    """`tools` for the chat template, or None when there are none or `tool_choice` is "none"."""
    tools = array(source, "tools", limits.max_tools)
    out = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    choice = source.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        # Checked for its shape first, then refused: only constrained decoding could keep such a promise.
        _check_choice(choice, out)
        raise invalid("tool_choice", 'tool_choice must be "auto" or "none"', "unsupported_parameter")
    if choice not in (None, "auto", "none"):
        raise invalid("tool_choice", 'tool_choice must be "auto" or "none"')
    return out if out and choice != "none" else None


def _check_choice(choice: Any, tools: list[dict[str, Any]]) -> None:
    if not tools:
        raise invalid("tool_choice", "tool_choice asks for a tool and there are no tools")
    if isinstance(choice, dict):
        _check_type(choice, "tool_choice")
        function = mapping(choice, "function", "tool_choice.function")
        if function is None or function.get("name") not in [tool["function"]["name"] for tool in tools]:
            raise invalid("tool_choice.function.name", "tool_choice must name one of the tools")


def _tool(tool: Any, param: str) -> dict[str, Any]:
    """The tool as it was given (a template shows it to the model), without nulls in the fields that we know."""
    if type(tool) is not dict:
        raise invalid(param, f"{param} must be an object")
    _check_type(tool, param)
    function = mapping(tool, "function", f"{param}.function")
    if function is None:
        raise invalid(f"{param}.function", f"{param}.function is required")
    param += ".function"
    _tool_name(function, f"{param}.name")
    string(function, "description", f"{param}.description")
    boolean(function, "strict", f"{param}.strict")
    parameters = mapping(function, "parameters", f"{param}.parameters")
    if parameters is not None:
        _check_schema(parameters, f"{param}.parameters")
    given = {
        name: value
        for name, value in function.items()
        if value is not None or name not in ("description", "parameters", "strict")
    }
    out = {**tool, "type": "function", "function": given}
    check_integers(out, param)
    return out


def _check_schema(schema: dict[str, Any], param: str) -> None:
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise schema_error(param, f"{param} is larger than {MAX_SCHEMA_BYTES} bytes")


def schema_error(param: str, message: str) -> ApiError:
    return invalid(param, message, "invalid_schema")
