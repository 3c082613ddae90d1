"""Checkers of laws that hold for every answer: the error object, and the form of a stream (behaviours 16, 20, 21)."""

from __future__ import annotations

import json
from typing import Any

ERROR_TYPES = {
    400: {"invalid_request_error"},
    401: {"authentication_error"},
    404: {"invalid_request_error"},
    405: {"invalid_request_error"},
    408: {"invalid_request_error"},
    413: {"invalid_request_error"},
    415: {"invalid_request_error"},
    429: {"rate_limit_error"},
    500: {"server_error"},
    503: {"server_error"},
    504: {"server_error"},
}
ERROR_CODES = {
    400: {
        "invalid_json",
        "invalid_value",
        "invalid_unicode",
        "unsupported_parameter",
        "unsupported_content_type",
        "invalid_schema",
        "context_length_exceeded",
    },
    401: {"invalid_api_key"},
    404: {"model_not_found", "not_found"},
    405: {"method_not_allowed"},
    408: {"request_timeout"},
    413: {"request_too_large"},
    415: {"unsupported_media_type"},
    429: {"queue_full"},
    500: {"internal_error"},
    503: {"engine_unavailable", "shutting_down", "kvnet_incompatible"},
    504: {"request_timeout"},
}
IN_BAND_CODES = {"internal_error", "engine_unavailable", "shutting_down", "request_aborted", "request_timeout"}
INTERPRETER_TEXT = (
    "Traceback",
    "list index out of range",
    "object at 0x",
    "site-packages",
    ".py",
    "NoneType",
    "msgspec",
)
FINISH_REASONS = {"stop", "length", "tool_calls"}


def check_error_fields(error: Any) -> dict[str, Any]:
    """`error` has exactly the four fields of the contract, and its message holds no interpreter text."""
    assert isinstance(error, dict), error
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str), error
    assert error["message"].strip(), error
    for name in ("param", "code"):
        assert error[name] is None or (isinstance(error[name], str) and error[name]), error
    for words in INTERPRETER_TEXT:
        assert words not in error["message"], error
    return error


def check_error_object(status: int, headers: dict[str, str], body: bytes) -> dict[str, Any]:
    """A refused request's answer has the contract's form; gives the error object."""
    assert status in ERROR_TYPES, f"status {status} is not one of the contract: {body[:200]!r}"
    assert headers["content-type"].split(";")[0] == "application/json", headers
    assert headers["x-request-id"], headers
    assert len(body) <= 4096, len(body)
    parsed = json.loads(body)
    assert set(parsed) == {"error"}, parsed
    error = check_error_fields(parsed["error"])
    assert error["type"] in ERROR_TYPES[status], (status, error)
    assert error["code"] in ERROR_CODES[status], (status, error)
    if status in (429, 503):
        assert 1 <= int(headers["retry-after"]) <= 60, headers
    if status == 401:
        assert headers["www-authenticate"] == "Bearer", headers
    if status == 405:
        assert headers["allow"], headers
    if status == 500:
        assert error["message"] == "internal error", error
    return error


def check_stream(headers: dict[str, str], lines: list[bytes], choices: int = 1) -> None:
    """A stream read to its end has a legal form and a legal end. `choices`: number of choices asked for."""
    assert headers["content-type"].split(";")[0] == "text/event-stream", headers
    assert headers["cache-control"] == "no-cache", headers
    assert headers["x-accel-buffering"] == "no", headers
    assert headers["x-request-id"], headers
    events = _events(lines)
    assert events and events[-1] == "[DONE]", events[-2:]
    assert events.count("[DONE]") == 1, "something follows the end"
    chunks = [json.loads(event) for event in events[:-1]]
    errors = [chunk for chunk in chunks if "error" in chunk]
    assert len(errors) <= 1, errors
    if errors:
        assert chunks[-1] is errors[0], "something follows the error event"
        assert set(errors[0]) == {"error"}, errors
        assert check_error_fields(errors[0]["error"])["code"] in IN_BAND_CODES, errors
        assert errors[0]["error"]["type"] in {"server_error", "invalid_request_error"}, errors
        chunks = chunks[:-1]
    _check_chunks(chunks, choices, failed=bool(errors))


def _events(lines: list[bytes]) -> list[str]:
    """Payloads of the data events; asserts one line per event and one blank line between events."""
    assert lines and lines[-1] == b"", "the last event is not ended by a blank line"
    events = []
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        text = line.decode()  # strict UTF-8: no delta ends inside a character
        if not text:
            assert following != b"", "two blank lines in a row"
            continue
        assert following == b"", f"an event of more than one line: {text[:80]}"
        if text.startswith(":"):
            continue
        assert text.startswith("data: "), text[:80]
        events.append(text[6:])
    return events


def _check_chunks(chunks: list[dict[str, Any]], choices: int, failed: bool) -> None:
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in chunks}) <= 1, f"chunks differ in {name}"
    started: set[int] = set()
    finished: set[int] = set()
    usage_chunks = 0
    for chunk in chunks:
        assert chunk["object"] in {"chat.completion.chunk", "text_completion"}, chunk
        if not chunk["choices"]:
            usage_chunks += 1
            assert chunk["usage"], "a chunk without choices and without usage"
            continue
        assert not usage_chunks, "a choice after the usage chunk"
        for choice in chunk["choices"]:
            _check_choice(choice, started, finished, chat=chunk["object"].startswith("chat"))
    assert usage_chunks <= 1
    if failed:
        assert not usage_chunks, "usage after an error"
        assert choices > 1 or not finished, "an error and a finish_reason"
    else:
        assert finished == started == set(range(choices)), (started, finished, choices)


def _check_choice(choice: dict[str, Any], started: set[int], finished: set[int], chat: bool) -> None:
    index = choice["index"]
    assert index not in finished, f"choice {index} goes on after its finish_reason"
    if chat:
        text = choice["delta"].get("content") or ""
        if index in started:
            assert "role" not in choice["delta"], "a later delta has a role"
        else:
            assert choice["delta"].get("role") == "assistant", choice
    else:
        text = choice["text"]
    assert not any("\ud800" <= character <= "\udfff" for character in text), "half a character in a delta"
    started.add(index)
    if choice["finish_reason"] is not None:
        assert choice["finish_reason"] in FINISH_REASONS, choice
        finished.add(index)
