"""The checkers themselves: a legal stream passes, and each kind of damage is seen (behaviours 16, 20, 21)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.pipeline.laws import check_error_object, check_stream

HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "x-request-id": "req-1",
}


def chunk(delta: dict[str, Any] | None, finish: str | None = None, usage: Any = None) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {
        "id": "a",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": usage,
    }


def good() -> list[dict[str, Any]]:
    return [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "a"}),
        chunk({"content": "b"}, "stop"),
        chunk(None, usage={"prompt_tokens": 1}),
    ]


def lines_of(chunks: list[dict[str, Any]], end: bool = True) -> list[bytes]:
    lines: list[bytes] = []
    for each in chunks:
        lines += [b"data: " + json.dumps(each).encode(), b""]
    return lines + ([b"data: [DONE]", b""] if end else [])


def fail(code: str = "engine_unavailable") -> dict[str, Any]:
    return {"error": {"message": "gone", "type": "server_error", "param": None, "code": code}}


def test_legal_streams_pass() -> None:
    check_stream(HEADERS, lines_of(good()))
    check_stream(HEADERS, lines_of([*good()[:2], fail()]))
    check_stream(HEADERS, lines_of([fail()]))
    check_stream(HEADERS, [b": waiting", b"", *lines_of(good())])


def changed(change: Callable[[list[dict[str, Any]]], Any]) -> list[bytes]:
    chunks = good()
    change(chunks)
    return lines_of(chunks)


DAMAGED = {
    "no end": lines_of(good(), end=False),
    "two ends": [*lines_of(good()), b"data: [DONE]", b""],
    "an event after the end": [*lines_of(good()), *lines_of(good()[1:2], end=False)],
    "no blank line": [line for line in lines_of(good()) if line],
    "two blank lines": [b"", *lines_of(good())[:2], b"", b"", *lines_of(good())[2:]],
    "not data": [b"event: x", b"", *lines_of(good())],
    "cut in the middle": lines_of(good())[:-1],
    "half a character": [lines_of(good())[0][:-1] + b"\xf0\x9f", *lines_of(good())[1:]],
    "half a surrogate pair": changed(lambda chunks: chunks[1]["choices"][0]["delta"].update(content="\ud83d")),
    "no role": changed(lambda chunks: chunks[0]["choices"][0]["delta"].pop("role")),
    "a second role": changed(lambda chunks: chunks[1]["choices"][0]["delta"].update(role="assistant")),
    "no finish": changed(lambda chunks: chunks[2]["choices"][0].update(finish_reason=None)),
    "two finishes": changed(lambda chunks: chunks[1]["choices"][0].update(finish_reason="stop")),
    "an unknown finish": changed(lambda chunks: chunks[2]["choices"][0].update(finish_reason="abort")),
    "text after the finish": changed(lambda chunks: chunks.insert(3, chunk({"content": "c"}))),
    "another id": changed(lambda chunks: chunks[1].update(id="b")),
    "another model": changed(lambda chunks: chunks[1].update(model="b")),
    "usage before a choice": changed(lambda chunks: chunks.insert(1, chunks.pop(3))),
    "an error and a finish": lines_of([*good()[:3], fail()]),
    "an error and usage": lines_of([*good()[:2], good()[3], fail()]),
    "something after an error": lines_of([good()[0], fail(), good()[1]]),
    "two errors": lines_of([good()[0], fail(), fail()]),
    "an unknown code": lines_of([good()[0], fail("oops")]),
    "only one of two choices": lines_of(good()),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_streams_are_seen(name: str) -> None:
    with pytest.raises((AssertionError, UnicodeDecodeError)):
        check_stream(HEADERS, DAMAGED[name], choices=2 if name == "only one of two choices" else 1)


@pytest.mark.parametrize("header", HEADERS)
def test_missing_headers_are_seen(header: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check_stream({name: value for name, value in HEADERS.items() if name != header}, lines_of(good()))


JSON = {"content-type": "application/json", "x-request-id": "r"}
ERROR = {"message": "bad", "type": "invalid_request_error", "param": None, "code": "invalid_value"}


@pytest.mark.parametrize(
    ("status", "headers", "error"),
    [
        (422, JSON, ERROR),
        (400, JSON | {"content-type": "text/html"}, ERROR),
        (400, {"content-type": "application/json"}, ERROR),
        (400, JSON, ERROR | {"message": ""}),
        (400, JSON, ERROR | {"message": "Traceback (most recent call last)"}),
        (400, JSON, ERROR | {"message": "x" * 5000}),
        (400, JSON, ERROR | {"code": "oops"}),
        (400, JSON, ERROR | {"type": "server_error"}),
        (400, JSON, {"message": "bad"}),
        (500, JSON, ERROR | {"type": "server_error", "code": "internal_error"}),
        (503, JSON, ERROR | {"type": "server_error", "code": "shutting_down"}),
        (503, JSON | {"retry-after": "0"}, ERROR | {"type": "server_error", "code": "shutting_down"}),
    ],
)
def test_wrong_error_objects_are_seen(status: int, headers: dict[str, str], error: dict[str, Any]) -> None:
    check_error_object(400, JSON, json.dumps({"error": ERROR}).encode())
    with pytest.raises((AssertionError, KeyError)):
        check_error_object(status, headers, json.dumps({"error": error}).encode())
