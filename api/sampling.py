"""Sampling fields, stop conditions and the names that are known and not supported; both routes share them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from api.errors import invalid, unsupported
from api.fields import (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    Object,
    array,
    boolean,
    integer,
    is_ids,
    mapping,
    number,
    positive,
    string,
)
from api.messages import MAX_SCHEMA_BYTES, schema_error
from wire.limits import Limits
from wire.messages import Sampling

NEVER_SUPPORTED = (
    "prompt_logprobs",
    "suffix",
    "functions",
    "function_call",
    "chat_template",
    "grammar",
    "structured_outputs",
    "audio",
)
GUIDED = "guided_"
GUIDED_NAMES = frozenset(
    GUIDED + name for name in ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")
)
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def refuse_unsupported(source: Object) -> None:
    """400 unsupported_parameter for a known name that is not null; `response_format` is checked for its shape first."""
    for name in NEVER_SUPPORTED:
        if source.get(name) is not None:
            raise unsupported(name)
    for name, value in source.items():
        if name.startswith(GUIDED) and value is not None:
            raise unsupported(name if name in GUIDED_NAMES else "guided_*")
    modalities = source.get("modalities")
    if modalities is not None:
        if type(modalities) is not list or not all(type(item) is str for item in modalities):
            raise invalid("modalities", "modalities must be an array of strings")
        if modalities != ["text"]:
            raise unsupported("modalities", "only text is supported")
    _check_response_format(source)


def _check_response_format(source: Object) -> None:
    found = mapping(source, "response_format")
    if found is None:
        return
    kind = found.get("type")
    if kind not in ("text", "json_object", "json_schema") or type(kind) is not str:
        raise invalid("response_format.type", "response_format.type must be text, json_object or json_schema")
    if kind == "text":
        return
    if kind == "json_schema":
        _check_json_schema(found)
    raise unsupported("response_format", "only response_format text is supported")


def _check_json_schema(found: Object) -> None:
    param = "response_format.json_schema"
    inner = mapping(found, "json_schema", param)
    if inner is None:
        raise invalid(param, f"{param} is required")
    name = string(inner, "name", f"{param}.name")
    if name is None or not SCHEMA_NAME.fullmatch(name):
        raise invalid(f"{param}.name", f"{param}.name must be 1 to 64 letters, digits, _ or -")
    string(inner, "description", f"{param}.description")
    boolean(inner, "strict", f"{param}.strict")
    schema = mapping(inner, "schema", f"{param}.schema")
    if schema is not None and len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise schema_error(f"{param}.schema", f"{param}.schema is larger than {MAX_SCHEMA_BYTES} bytes")


def parse_n(source: Object, limits: Limits) -> int:
    """Choices per prompt."""
    n = integer(source, "n", 1, limits.max_n) or 1
    best_of = source.get("best_of")
    if best_of is not None:
        if type(best_of) is not int:
            raise invalid("best_of", "best_of must be an integer")
        if best_of != n:
            raise unsupported("best_of", "best_of other than n is not supported")
    return n


def parse_sampling(source: Object, limits: Limits, logprobs: int, chat: bool) -> Sampling:
    """All sampling fields; what is absent stays None for the tokenizer to resolve."""
    max_tokens, field = _max_tokens(source, chat)
    min_tokens = positive(source, "min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens must not be above {field}")
    return Sampling(
        temperature=number(source, "temperature", 0, 2),
        top_p=number(source, "top_p", 0, 1, open_low=True),
        top_k=_top_k(source),
        min_p=number(source, "min_p", 0, 1),
        presence_penalty=number(source, "presence_penalty", -2, 2),
        frequency_penalty=number(source, "frequency_penalty", -2, 2),
        repetition_penalty=number(source, "repetition_penalty", 0, 10, open_low=True),
        logit_bias=_logit_bias(source, limits),
        seed=integer(source, "seed", INT64_MIN, INT64_MAX),
        max_tokens=max_tokens,
        max_tokens_field=field,
        min_tokens=min_tokens,
        ignore_eos=boolean(source, "ignore_eos") or False,
        stop=_stop(source, limits),
        stop_token_ids=_stop_token_ids(source, limits),
        logprobs=logprobs,
    )


def _max_tokens(source: Object, chat: bool) -> tuple[int | None, str]:
    old = positive(source, "max_tokens")
    if not chat:
        return old, "max_tokens"
    new = positive(source, "max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise invalid("max_completion_tokens", "max_tokens and max_completion_tokens are both given and differ")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _top_k(source: Object) -> int | None:
    value = source.get("top_k")
    if value is None:
        return None
    if type(value) is not int or (value != -1 and value < 1):
        raise invalid("top_k", "top_k must be -1 or an integer of at least 1")
    return min(value, INT32_MAX)


def _logit_bias(source: Object, limits: Limits) -> dict[int, float] | None:
    found = mapping(source, "logit_bias")
    if not found:
        return None
    if len(found) > limits.max_logit_bias:
        raise invalid("logit_bias", f"logit_bias must have at most {limits.max_logit_bias} entries")
    out: dict[int, float] = {}
    for name in found:
        if not TOKEN_ID.fullmatch(name) or int(name) > INT32_MAX:
            raise invalid("logit_bias", "a key of logit_bias is not a token id of the model")
        value = number(found, name, -100, 100, param="logit_bias")
        if value is None:
            raise invalid("logit_bias", "a value of logit_bias is not a number")
        out[int(name)] = value
    return out


def _stop(source: Object, limits: Limits) -> list[str]:
    found: Any = source.get("stop")
    if found is None:
        return []
    if type(found) is str:
        found = [found]
    if type(found) is not list or not all(type(item) is str for item in found):
        raise invalid("stop", "stop must be a string or an array of strings")
    if len(found) > limits.max_stop:
        raise invalid("stop", f"stop must have at most {limits.max_stop} strings")
    if not all(1 <= len(item) <= limits.max_stop_chars for item in found):
        raise invalid("stop", f"each stop string must have 1 to {limits.max_stop_chars} characters")
    return list(found)


def _stop_token_ids(source: Object, limits: Limits) -> list[int]:
    found = array(source, "stop_token_ids", limits.max_stop_token_ids) or []
    if not is_ids(found):
        raise invalid("stop_token_ids", "stop_token_ids must hold token ids of the model")
    return list(found)
