"""Law: every stream has the contract's form, order and end, whatever comes in which pieces (behaviours 13-20)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.web import Stream, poll
from tests.unit.frontend_world import Call, World, world
from wire.messages import Abort, Rejected, TextDelta, TextOutput, Usage

USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


def test_tokens_become_chunks_then_the_finish_chunk_then_done(here: World) -> None:
    call = here.chat(stream=True).accept()
    stream = call.stream()
    call.text("Hel")
    assert stream.first_token() < 2
    call.text('lo "é\n\u2028\x00').finish()
    stream.read()
    assert stream.text() == 'Hello "é\n\u2028\x00'
    assert stream.finish_reason() == "length"
    assert stream.headers["x-deepinfer-route"] == "rank=2; reason=session"
    assert stream.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Hel"}
    assert stream.chunks[-1]["choices"][0]["delta"] == {}
    assert not any("usage" in chunk for chunk in stream.chunks)
    assert stream.chunks[0]["id"].startswith("chatcmpl-")


def test_the_status_line_is_withheld_until_every_choice_is_accepted(here: World) -> None:
    call = here.chat(stream=True, n=2).accept(1)
    call.text("early")
    call.connection.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        call.connection.sock.recv(1)
    call.connection.sock.settimeout(5)
    call.accept(1)
    stream = call.stream(2)
    call.finish().finish(choice=1)
    assert stream.read().text() == "early"


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_is_the_same_plain_answer_in_both_modes(here: World, stream: bool) -> None:
    text = "the maximum context length is 10 tokens, this is 12"
    refusals: list[tuple[int, str, str, str | None, int]] = [
        (400, "invalid_request_error", "context_length_exceeded", "messages", 0),
        (429, "rate_limit_error", "queue_full", None, 3),
        (503, "server_error", "engine_unavailable", None, 0),
        (504, "server_error", "request_timeout", None, 0),
    ]
    for status, kind, code, param, wait in refusals:
        call = here.chat(stream=stream)
        here.tokenizer.say(Rejected(call.rid, status, kind, code, param, text, wait))
        answer = call.answer()
        error = answer.error
        assert (answer.status, error["type"], error["code"], error["param"]) == (status, kind, code, param)
        assert error["message"] == text
        assert answer.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


def test_text_that_comes_in_one_drain_is_one_chunk_of_one_choice(here: World) -> None:
    call = here.chat(stream=True, n=2).accept(2)
    stream = call.stream(2)
    deltas = [call.delta(text, choice) for text, choice in [("a", 0), ("x", 1), ("b", 0), ("y", 1), ("c", 0)]]
    here.tokenizer.say(TextOutput(deltas))
    call.finish("stop").finish("length", choice=1)
    stream.read()
    assert stream.deltas(0) == ["abc"]
    assert stream.deltas(1) == ["xy"]
    assert (stream.finish_reason(0), stream.finish_reason(1)) == ("stop", "length")


def test_usage_comes_after_the_finish_chunk_and_before_done(here: World) -> None:
    call = here.chat(**USAGE).accept()
    stream = call.stream()
    call.text("a").text("b").finish(cached_tokens=128)
    stream.read()
    assert all(chunk["usage"] is None for chunk in stream.chunks[:-1])
    assert stream.chunks[-1]["choices"] == []
    usage = stream.chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 2, 7)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 128
    assert stream.lines[-2] == b"data: [DONE]"


def test_continuous_usage_counts_in_every_chunk(here: World) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = here.chat(stream=True, stream_options=options).accept()
    stream = call.stream()
    call.text("a")
    assert stream.first_token() < 2
    call.text("b", tokens=3).finish()
    stream.read()
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
    assert counts[0] == 1
    assert counts[-1] == 4
    assert all(chunk["usage"]["prompt_tokens"] == 5 for chunk in stream.chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_unless_it_is_asked_for(here: World, options: Any) -> None:
    call = here.chat(stream=True, stream_options=options).accept()
    stream = call.stream()
    call.text("a").finish()
    stream.read()
    assert all(len(chunk["choices"]) == 1 and not chunk.get("usage") for chunk in stream.chunks)


def test_choices_of_several_prompts_count_each_prompt_once(here: World) -> None:
    call = here.completion(prompt=["a", "b"], n=2, **USAGE).accept(4)
    stream = call.stream(4)
    for choice in range(4):
        call.text(f"t{choice}", choice=choice)
        call.finish(choice=choice, cached_tokens=128 * choice)
    stream.read()
    assert [stream.text(choice) for choice in range(4)] == ["t0", "t1", "t2", "t3"]
    usage = stream.usage
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 4)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 256  # of choices 0 and 2
    assert stream.chunks[0]["object"] == "text_completion"


def test_logprobs_pass_through_in_each_route_s_form(here: World) -> None:
    call = here.chat(stream=True, logprobs=True).accept()
    stream = call.stream()
    entries: list[dict[str, Any]]
    entries = [{"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []} for text in "ab"]
    deltas = [call.delta(str(entry["token"]), logprobs=json.dumps([entry]).encode()) for entry in entries]
    here.tokenizer.say(TextOutput(deltas))
    call.finish()
    stream.read()
    assert stream.chunks[0]["choices"][0]["logprobs"] == {"content": entries, "refusal": None}

    call = here.completion(stream=True, logprobs=1).accept()
    stream = call.stream()
    legacy = [{"token": text, "token_logprob": -0.5, "top_logprobs": {text: -0.5}, "text_offset": i}
              for i, text in enumerate("ab")]  # fmt: skip
    call.text("ab", tokens=2, logprobs=json.dumps(legacy).encode()).finish()
    stream.read()
    found = stream.chunks[0]["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b"]
    assert found["text_offset"] == [0, 1]
    assert found["token_logprobs"] == [-0.5, -0.5]
    assert found["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]


def test_an_end_without_text_still_has_a_role_and_a_finish_reason(here: World) -> None:
    call = here.chat(stream=True).accept()
    stream = call.stream()
    call.finish("stop")
    stream.read()
    assert [chunk["choices"][0]["delta"] for chunk in stream.chunks] == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize("code", ["engine_unavailable", "internal_error", "request_aborted", "request_timeout"])
def test_a_failure_in_mid_stream_is_one_event_then_done(here: World, code: str) -> None:
    call = here.chat(**USAGE).accept()
    stream = call.stream()
    call.text("some")
    assert stream.first_token() < 2
    call.text(" more").fail(code)
    stream.read()
    assert stream.text() == "some more"
    assert stream.error is not None
    assert (stream.error["code"], stream.error["type"], stream.error["param"]) == (code, "server_error", None)
    assert stream.finish_reason() is None


def test_a_failed_choice_ends_the_others(here: World) -> None:
    call = here.chat(stream=True, n=2).accept(2)
    stream = call.stream(2)
    call.fail("internal_error", choice=1)
    assert stream.read().error is not None
    assert here.tokenizer.next(Abort).sids == [call.rid, call.rid | 1]


def test_the_prompt_s_ids_are_in_the_first_chunk_only_with_the_hook(here: World) -> None:
    call = here.chat(stream=True).accept(prompt_ids=[1, 2])
    stream = call.stream()
    call.text("a").text("b").finish()
    stream.read()
    assert [chunk.get("deepinfer_prompt_ids") for chunk in stream.chunks][:1] == [[1, 2]]
    assert all("deepinfer_prompt_ids" not in chunk for chunk in stream.chunks[1:])


def test_repeated_text_is_skipped_by_its_offset_and_missing_text_ends_the_stream(here: World) -> None:
    call = here.chat(stream=True, logprobs=True).accept()
    stream = call.stream()

    def send(offset: int, text: str, tokens: int, names: str, **end: Any) -> None:
        entries = json.dumps([{"token": name} for name in names]).encode()
        here.tokenizer.say(TextOutput([TextDelta(call.rid, offset, text, tokens, logprobs=entries, **end)]))

    send(0, "abc", 3, "abc")
    send(0, "ab", 2, "ab")
    send(1, "bcde", 5, "bcde")
    send(5, "f", 6, "f", finish_reason="stop", usage=Usage(5))
    stream.read()
    assert stream.text() == "abcdef"
    entries = [chunk["choices"][0]["logprobs"] for chunk in stream.chunks]
    assert [item["token"] for entry in entries if entry for item in entry["content"]] == list("abcdef")

    call = here.chat(stream=True).accept()
    stream = call.stream()
    here.tokenizer.say(TextOutput([TextDelta(call.rid, 3, "x", 1)]))
    assert (stream.read().error or {})["code"] == "internal_error"


def test_comments_go_out_while_nothing_else_does() -> None:
    with world(comment_seconds=0.3) as here:
        call = here.chat(stream=True).accept()
        stream = call.stream()
        for _ in range(2):
            line = stream.next_line()
            assert line is not None
            assert line.startswith(b":")
            assert stream.next_line() == b""
        call.text("a").finish()
        assert stream.read().text() == "a"


def test_a_client_that_leaves_is_aborted_at_once_in_both_modes_and_while_queued(here: World) -> None:
    before = here.frontend.metrics.aborted
    cases: list[tuple[dict[str, Any], bool]]
    cases = [({"stream": True}, True), ({}, True), ({"stream": True}, False), ({"n": 2}, False)]
    for fields, accepted in cases:
        call = here.chat(**fields)
        if accepted:
            call.accept()
            call.text("a")
            poll("it is accepted", call.is_open, 5)
        started = time.perf_counter()
        if accepted and fields:
            assert call.stream().first_token() < 2
            call.last.close()
        call.connection.close()
        abort = here.tokenizer.next(Abort)
        assert time.perf_counter() - started < 1
        assert (abort.sids[0], abort.reason) == (call.rid, "client")
        poll("it is released", lambda: not here.frontend.hub.live, 5)
    assert here.frontend.metrics.aborted == before + 4


def test_what_comes_late_for_an_ended_request_is_dropped(here: World) -> None:
    call = here.chat(stream=True).accept()
    stream = call.stream()
    call.text("a").finish()
    call.text("late").fail("internal_error")
    assert stream.read().text() == "a"
    late = here.chat()
    late.connection.close()
    assert here.tokenizer.next(Abort).sids == [late.rid]
    late.accept()  # it was on its way: the frontend says again that nobody wants it
    assert here.tokenizer.next(Abort).sids == [late.rid]


def test_a_reader_that_does_not_read_is_aborted_and_holds_little_memory() -> None:
    with world(send_stall_seconds=0.6) as here:
        call, beside = _stalled(here), here.chat(stream=True).accept()
        stream = beside.stream()
        beside.text("a")
        assert stream.first_token() < 2
        for _ in range(400):
            call.text("x" * 1000)
        started = time.perf_counter()
        abort = here.tokenizer.next(Abort)
        assert (abort.sids, abort.reason) == ([call.rid], "stall")
        assert time.perf_counter() - started < 4
        beside.text("b").finish()
        assert stream.read().text() == "ab"
        poll("its stream is closed", lambda: not here.frontend.app.active and not here.frontend.hub.streams, 5)
        assert here.frontend.metrics.stalled == 1


def test_a_stalled_stream_holds_at_most_a_bounded_text() -> None:
    with world(send_stall_seconds=60) as here:
        call = _stalled(here)
        for _ in range(60):
            call.text("x" * 100_000)
        assert here.tokenizer.next(Abort).reason == "stall"
        poll("its stream is closed", lambda: not here.frontend.app.active, 5)


def _stalled(here: World) -> Call:
    """A stream whose client has a tiny receive buffer and never reads."""
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((here.host, here.port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    call = Call(here)
    call.keep = client
    return call.accept()


Piece = tuple[int, str]


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5)), max_size=12),
    st.lists(st.booleans(), min_size=15, max_size=15),
    st.booleans(),
)
def test_any_grouping_of_any_text_gives_a_legal_stream(
    here: World, n: int, pieces: list[Piece], splits: list[bool], usage: bool
) -> None:
    call = here.chat(n=n, stream=True, stream_options={"include_usage": usage}).accept(n)
    stream: Stream = call.stream(n)
    pieces = [(choice % n, text) for choice, text in pieces]
    group: list[TextDelta] = []
    for (choice, text), split in zip(pieces, splits, strict=False):
        group.append(call.delta(text, choice))
        if split:
            here.tokenizer.say(TextOutput(group))
            group = []
    here.tokenizer.say(TextOutput(group))
    for choice in range(n):
        call.finish(choice=choice)
    stream.read()
    for choice in range(n):
        assert stream.text(choice) == "".join(text for index, text in pieces if index == choice)
