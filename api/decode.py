"""Body bytes to a JSON object, strictly: the fast decoder first, a slow second look that names what is wrong.

msgspec refuses unpaired surrogates, NaN and numbers beyond a double, but cannot say in which field they are. Only a
body that it refused is read again by the standard library, which keeps such values so that the field can be named.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from api.errors import ApiError, invalid

MAX_INTEGER_DIGITS = 400  # more digits change nothing: the value is out of every range

# Names that may stand in `error.param`. A path ends before the first name that is not one of ours.
NAMES = frozenset(
    re.findall(
        r"\w+",
        """
    model messages role content type text name tool_calls tool_call_id id function arguments reasoning_content tools
    description parameters strict tool_choice prompt stream stream_options include_usage continuous_usage_stats n
    best_of temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias seed
    max_tokens max_completion_tokens min_tokens ignore_eos stop stop_token_ids logprobs top_logprobs user metadata
    session_id prompt_cache_key prefix_cache response_format json_schema schema chat_template_kwargs chat_template
    echo suffix prompt_logprobs functions function_call grammar structured_outputs audio modalities
    parallel_tool_calls reasoning_effort service_tier store extra_body cache_salt request_id
    """,
    )
)
# A JSON schema's inside is the client's own vocabulary: its path ends at the schema.
SCHEMAS = re.compile(r"tools\[\d+\]\.function\.parameters|response_format\.json_schema\.schema")
TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)

ONE_KIND = bytes.maketrans(b"{}", b"[]")
OTHER_BYTES = bytes(byte for byte in range(256) if byte not in b"[]{}")

_decoder = msgspec.json.Decoder()
_Path = tuple[str | int, ...]


class _Constant:
    """Stands for a literal NaN, Infinity or -Infinity."""


def decode_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """The JSON object in `body`; a repeated name counts once, with its last value.

    Raises ApiError 400 with invalid_json, invalid_unicode, or (depth, not an object) invalid_value, invalid_schema.
    """
    collects = gc.isenabled()
    gc.disable()  # many small objects at once, none of them garbage: looking for some would take most of the time
    try:
        value = _decoder.decode(body)
    except RecursionError:
        raise _too_deep(_top_field(body, max_depth), max_depth) from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        value = _second_look(body, max_depth)
    finally:
        if collects:
            gc.enable()
    # Fewer brackets than levels allowed: nothing to look at, which is the case for almost all bodies.
    if body.count(b"{") + body.count(b"[") > max_depth and _is_deeper(body, max_depth):
        _check_depth(value, max_depth)
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object")
    return value


def _second_look(body: bytes, max_depth: int) -> Any:
    try:
        # surrogatepass: surrogates in raw UTF-8 are found below like escaped ones.
        value = json.loads(body.decode("utf-8", "surrogatepass"), parse_constant=_constant, parse_int=_integer)
    except RecursionError:
        raise _too_deep(_top_field(body, max_depth), max_depth) from None
    except ValueError:
        raise invalid(None, "the body is not valid JSON", "invalid_json") from None
    for path, item in _leaves(value):
        if isinstance(item, _Constant):
            raise invalid(_name(path), "NaN and Infinity are not valid JSON", "invalid_json")
        if isinstance(item, str) and not _is_unicode(item):
            raise invalid(_name(path), "a string holds an unpaired surrogate", "invalid_unicode")
    return value


def _constant(_: str) -> _Constant:
    return _Constant()


def _integer(digits: str) -> int:
    return int(digits[:MAX_INTEGER_DIGITS])


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _leaves(value: Any) -> Iterator[tuple[_Path, Any]]:
    """All values that are no containers, and all names of objects, with their paths, in document order."""
    stack: list[tuple[_Path, Any]] = [((), value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict):
            yield from ((path, name) for name in item)
            stack.extend(((*path, name), child) for name, child in reversed(item.items()))
        elif isinstance(item, list):
            stack.extend(((*path, index), item[index]) for index in range(len(item) - 1, -1, -1))
        else:
            yield path, item


def _is_deeper(body: bytes, max_depth: int) -> bool:
    """Whether valid JSON is nested deeper, found without a step of ours for each value in it."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = b"".join(unescaped.split(b'"')[::2]).translate(ONE_KIND, OTHER_BYTES)
    for _ in range(max_depth):
        if not marks:
            return False
        marks = marks.replace(b"[]", b"")  # the innermost level
    return bool(marks)


def _check_depth(value: Any, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth):
        inner: list[Any] = []
        for item in level:
            if type(item) is dict:
                inner += [child for child in item.values() if type(child) in (dict, list)]
            elif type(item) is list:
                inner += [child for child in item if type(child) in (dict, list)]
        if not inner:
            return
        level = inner
    raise _too_deep(_name(_deepest(value, max_depth)), max_depth)


def _deepest(value: Any, max_depth: int) -> _Path:
    """The path of the first container below `max_depth` levels."""
    stack: list[tuple[_Path, Any]] = [((), value)]
    while stack:
        path, item = stack.pop()
        if len(path) == max_depth:
            return path
        children = item.items() if isinstance(item, dict) else enumerate(item)
        stack += [((*path, name), child) for name, child in children if isinstance(child, (dict, list))]
    return ()


def _top_field(body: bytes, max_depth: int) -> str | None:
    """The field of the outermost object in which the depth is passed, for a body that no decoder can hold."""
    depth, name = 0, b""
    for found in TOKENS.finditer(body):
        token = found.group()
        if token in (b"{", b"["):
            depth += 1
            if depth > max_depth:
                break
        elif token in (b"}", b"]"):
            depth -= 1
        elif depth == 1:
            name = token[1:-1]
    text = name.decode("ascii", "replace")
    return text if text in NAMES else None


def _too_deep(param: str | None, max_depth: int) -> ApiError:
    if param is not None and (param == "tools" or SCHEMAS.match(param)):
        return invalid(param, f"JSON nested deeper than {max_depth} levels", "invalid_schema")
    return invalid(param and param.split("[")[0], f"JSON nested deeper than {max_depth} levels")


def _name(path: _Path) -> str | None:
    """`messages[3].content`; stops where names stop being the API's own."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part in NAMES and not SCHEMAS.fullmatch(text):
            text += f".{part}" if text else part
        else:
            break
    return text or None
