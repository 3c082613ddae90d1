"""Chat templates: sandboxed Jinja that gives the reference library's text, and names what it cannot render."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from api.errors import ApiError, invalid
from tokenizer_proc.guard import MARKS, GenerationTag, Guard

# What a template's own expressions raise on messages that it was not written for.
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
ESCAPED_MARKS = {json.dumps(mark)[1:-1]: mark for mark in MARKS[:32]}
PROBE = '{"probe_argument": 1}'


class ChatTemplate:
    """The templates of a model ("default", and perhaps "tool_use")."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        control: Mapping[str, int],
        now: Callable[[], datetime] = datetime.now,
        origin: str = "",
    ) -> None:
        """Compile. Raises ValueError with `origin`, or the template's name, for one that is not valid Jinja."""
        self._special_tokens = dict(special_tokens)
        environment = _environment(now)
        self._sources = dict(sources)
        self._compiled: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._compiled[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                place = origin or f"chat template {name!r}"
                raise ValueError(f"{place}: line {error.lineno}: {error.message}") from error
        self._guard = Guard(control, self._compiled and sources.values())
        self._wants_objects = {name: self._wants_objects_in(name) for name in self._compiled}

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any] | None
    ) -> tuple[str, str]:
        """(text, mark): the prompt's text with the marks of `Guard` in it ("" when there are none).

        Raises ApiError 400 when the model has no template, or its template cannot render these messages.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise invalid("messages", "this model has no chat template; use /v1/completions")
        if self._wants_objects[name]:
            messages = [_with_argument_objects(message) for message in messages]
        messages, tools, mark = self._guard.protect(messages, tools)
        try:
            return self._render(name, messages, tools, kwargs or {}), mark
        except TEMPLATE_FAULTS as error:
            raise self._refusal(name, error) from error

    def _render(
        self,
        name: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        aliased = [_with_thinking(message) for message in messages]
        names = {**self._special_tokens, **kwargs}
        return self._compiled[name].render(
            messages=aliased, tools=tools, documents=None, add_generation_prompt=True, **names
        )

    def _refusal(self, name: str, error: BaseException) -> ApiError:
        # A message that stands in the template word for word holds nothing of the client's.
        text = str(error)
        plain = isinstance(error, jinja2.TemplateError) and len(text) >= 8 and text in self._sources[name]
        return invalid("messages", text if plain else "the chat template cannot render these messages")

    def _wants_objects_in(self, name: str) -> bool:
        """Whether the template wants a call's arguments as an object: it shows a string not as it is.

        Clients send a string of JSON. Templates that would quote it once more, or fail, get the object.
        """
        call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": PROBE}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "b", "tool_call_id": "call00000"},
        ]
        tools = [{"type": "function", "function": {"name": "probe", "description": "c", "parameters": {}}}]

        def shows(messages: list[dict[str, Any]], text: str) -> bool:
            try:
                return text in self._render(name, messages, tools, {})
            except TEMPLATE_FAULTS:
                return False

        return not shows(messages, PROBE) and shows([_with_argument_objects(item) for item in messages], "probe_arg")


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As the reference library has it; marks stay marks also where other characters are escaped."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii and "\\ufd" in text:
        for escaped, mark in ESCAPED_MARKS.items():
            text = text.replace(escaped, mark)
    return text


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Some templates know `reasoning_content` under its other name."""
    if "reasoning_content" not in message:
        return message
    return {"thinking": message["reasoning_content"], **message}


def _with_argument_objects(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_argument_object(call) for call in calls]}


def _with_argument_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"]) if function["arguments"].strip() else {}
    except (ValueError, RecursionError):
        return call  # what a model wrote and is no JSON is shown to it as it was
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
