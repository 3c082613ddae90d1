"""Streams have one form, one end, and cost nothing once their client has gone.

3, 14: a failure shows no choices, or one in-band error. 4, 5, 18: a client that leaves frees what it held.
13: a refusal is the same with and without stream. 15, 16: usage in streams. 17: both modes say the same.
19: clients that do not read. 20 holds for every stream of the suite (`laws.check_stream`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.harness import SLACK, TINY, Service, model_copy, service
from tests.pipeline.web import Stream, poll, together

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def body_of(server: Service, path: str, content: str = "hello", **fields: Any) -> dict[str, Any]:
    return server.chat_body(content, **fields) if path == CHAT else server.prompt_body(content, **fields)


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose engine these tests kill; engines come back, and no sequence is resumed."""
    with service(tmp_path_factory.mktemp("mortal")) as found:
        yield found


def whole_again(server: Service) -> None:
    poll("the engine is back", server.healthy, 15 * SLACK)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_3_a_failed_request_has_no_choices(mortal: Service, path: str) -> None:
    answer = mortal.post(path, body_of(mortal, path, hooks={"nan_step": 3}, max_tokens=20))
    assert answer.status == 500
    assert answer.error["code"] == "internal_error"
    assert b"choices" not in answer.body
    answer = mortal.post(path, body_of(mortal, path, hooks={"fail_admit": True}, max_tokens=20))
    assert answer.status == 500
    assert answer.error["code"] == "internal_error"


def test_3_a_request_whose_engine_died_has_no_choices(mortal: Service) -> None:
    answer = mortal.post(CHAT, mortal.chat_body(hooks={"fail_step": 3}, max_tokens=20))
    assert answer.status == 503
    assert answer.error["code"] == "engine_unavailable"
    assert b"choices" not in answer.body
    whole_again(mortal)


def ends_in_band(stream: Stream, code: str, since: float) -> None:
    stream.read()
    assert stream.times[-1] - since < 5 * SLACK
    assert stream.error is not None
    assert stream.error["code"] == code
    assert stream.error["type"] == "server_error"
    assert stream.error["param"] is None
    assert stream.lines[-2:] == [b"data: [DONE]", b""]
    assert stream.finish_reason() is None
    assert not [chunk for chunk in stream.chunks if chunk.get("usage")]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_14_an_engine_that_dies_ends_its_streams_in_band(mortal: Service, path: str) -> None:
    body = body_of(
        mortal, path, hooks={"fail_step": 5, "step_ms": 30}, max_tokens=20, stream_options={"include_usage": True}
    )
    stream = mortal.stream(path, body)
    stream.first_token()
    ends_in_band(stream, "engine_unavailable", time.perf_counter())
    whole_again(mortal)


def test_14_an_engine_that_is_killed_ends_its_streams_in_band(mortal: Service) -> None:
    body = mortal.chat_body(hooks={"step_ms": 20}, max_tokens=1000)
    streams = [mortal.stream(CHAT, body) for _ in range(4)]
    for stream in streams:
        stream.first_token()
    (engine,) = mortal.children("engine")
    killed = time.perf_counter()
    engine.kill()
    for stream in streams:
        ends_in_band(stream, "engine_unavailable", killed)
    whole_again(mortal)
    assert mortal.post(CHAT, mortal.chat_body(max_tokens=2)).status == 200


def test_14_non_finite_logits_end_their_stream_only(mortal: Service) -> None:
    other = mortal.stream(CHAT, mortal.chat_body(hooks={"step_ms": 5}, max_tokens=60))
    failing = mortal.stream(CHAT, mortal.chat_body(hooks={"nan_step": 4}, max_tokens=60))
    ends_in_band(failing, "internal_error", time.perf_counter())
    assert other.read().finish_reason() == "length"


# --- clients that leave -----------------------------------------------------------------------------------------------


def test_4_a_client_that_leaves_frees_its_request(server: Service) -> None:
    before = server.metrics().total("requests_aborted_total")
    connection = server.connect()
    server._send(connection, "POST", CHAT, server.chat_body(hooks={"step_ms": 20}, max_tokens=1500), None)
    poll("the request runs", lambda: server.metrics().total("requests_running") == 1, 2 * SLACK)
    connection.close()
    server.idle()
    assert server.metrics().total("requests_aborted_total") == before + 1


def test_5_leaving_in_prefill_or_in_the_queue_frees_the_way(folder: Path) -> None:
    step_ms, chunk = 100, 128
    with service(folder, "--prefill-chunk-tokens", str(chunk), "--max-running", "1") as server:
        long = server.prompt_body([7] * (12 * chunk), hooks={"step_ms": step_ms}, max_tokens=4)
        connections = []
        for _ in range(2):  # the second one waits in the queue
            connections.append(server.connect())
            server._send(connections[-1], "POST", COMPLETIONS, long, None)
        poll(
            "one runs and one waits",
            lambda: [server.metrics().total(f"requests_{name}") for name in ("running", "waiting")] == [1, 1],
            2 * SLACK,
        )
        for connection in connections:
            connection.close()
        stream = server.stream(COMPLETIONS, server.prompt_body("short", max_tokens=2))
        took = stream.first_token()
        stream.read()
        assert took < (step_ms / 1000 + 1) + 0.5, took  # one chunk time plus 1 s; the whole prefill takes 1.2 s each
        server.idle()


@pytest.mark.parametrize("clients", [12, pytest.param(50, marks=pytest.mark.long)])
def test_18_streams_whose_clients_leave_end(server: Service, clients: int) -> None:
    lines = len(server.log().splitlines())

    def leave() -> None:
        stream = server.stream(CHAT, server.chat_body(hooks={"step_ms": 5}, max_tokens=1500))
        stream.first_token()
        stream.close()

    together([leave] * clients)
    server.idle()
    assert len(server.log().splitlines()) - lines <= clients


def stalled_streams(server: Service, clients: int) -> list[Stream]:
    body = server.chat_body(hooks={"step_ms": 2, "tokens_per_step": 8}, ignore_eos=True)
    return [server.stream(CHAT, body, receive_buffer=2048) for _ in range(clients)]


def token_rate(server: Service) -> float:
    """Tokens per second of one paced stream, from its first token on."""
    stream = server.stream(CHAT, server.chat_body(hooks={"step_ms": 5}, max_tokens=200))
    stream.first_token()
    started = time.perf_counter()
    stream.read()
    return 199 / (time.perf_counter() - started)


@pytest.mark.parametrize("clients", [6, pytest.param(20, marks=pytest.mark.long)])
def test_19_clients_that_do_not_read_are_cut(folder: Path, clients: int) -> None:
    model = model_copy(folder.parent / "model", TINY, max_position_embeddings=262_144)
    with service(folder, "--send-stall-seconds", "2", model=model) as server:
        solo = token_rate(server)
        memory = sum(child.memory_info().rss for child in server.children("frontend"))
        stalled = stalled_streams(server, clients)
        rate = token_rate(server)
        poll("stalled streams end", lambda: server.metrics().total("requests_running") == 0, 60)
        grown = sum(child.memory_info().rss for child in server.children("frontend")) - memory
        assert grown < 64 << 20, grown
        assert rate > solo * 0.8 / (1 if clients == 20 else 2), (rate, solo)
        server.idle()
        for stream in stalled:
            stream.close()


# --- refusals and usage -----------------------------------------------------------------------------------------------

REFUSALS: list[dict[str, Any]] = [
    {"model": "other"},
    {"temperature": 3},
    {"max_tokens": 10_000_000},
    {"n": 0},
    {"messages": []},
    {"messages": [{"role": "user", "content": "word " * 100_000}]},
    {"stop": [""]},
    {"metadata": {"deepinfer_hooks": {"fail_admit": True}}},
]


@pytest.mark.parametrize("fields", REFUSALS, ids=lambda fields: next(iter(fields)))
def test_13_a_refusal_is_the_same_with_and_without_stream(server: Service, fields: dict[str, Any]) -> None:
    body = server.chat_body() | fields
    answers = [server.post(CHAT, body | {"stream": stream}) for stream in (True, False)]
    assert answers[0].status == answers[1].status >= 400
    assert answers[0].error == answers[1].error
    assert not [answer for answer in answers if b"data:" in answer.body]


def test_13_a_comment_goes_out_while_a_stream_waits(folder: Path) -> None:
    with service(folder, "--max-running", "1", "--comment-seconds", "1") as server:
        running = server.stream(CHAT, server.chat_body(hooks={"step_ms": 50}, max_tokens=400))
        running.first_token()
        waiting = server.stream(CHAT, server.chat_body(max_tokens=2))
        assert waiting.status == 200, "the status line waits for the engine's queue, not for a token"
        line = waiting.next_line()
        assert line is not None and line.startswith(b":"), line
        assert waiting.next_line() == b""
        assert waiting.times[0] - waiting.started < 1 * SLACK
        running.close()
        assert waiting.read().finish_reason() == "length"


@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_15_without_include_usage_no_chunk_has_usage(server: Service, path: str, options: Any) -> None:
    extra: dict[str, Any] = {} if options == "absent" else {"stream_options": options}
    stream = server.stream(path, body_of(server, path, max_tokens=5, **extra)).read()
    assert stream.chunks
    for chunk in stream.chunks:
        assert len(chunk["choices"]) == 1
        assert chunk.get("usage") is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
def test_16_with_include_usage_it_comes_last(server: Service, path: str, n: int) -> None:
    body = body_of(server, path, max_tokens=5, n=n, stream_options={"include_usage": True})
    stream = server.stream(path, body).read()
    *chunks, last = stream.chunks
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == 5 * n
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert type(usage["prompt_tokens_details"]["cached_tokens"]) is int
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    for chunk in chunks:
        assert chunk["usage"] is None
    assert {chunk["object"] for chunk in stream.chunks} == {
        "chat.completion.chunk" if path == CHAT else "text_completion"
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_16_continuous_usage(server: Service, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = server.stream(path, body_of(server, path, max_tokens=5, stream_options=options)).read()
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_16_include_usage_wants_a_boolean(server: Service) -> None:
    wrong: list[Any] = [{"include_usage": "yes"}, {"include_usage": 1}, [], "x"]
    for options in wrong:
        answer = server.post(CHAT, server.chat_body(stream=True, stream_options=options))
        assert answer.status == 400
        assert answer.error["param"].startswith("stream_options")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("per_step", [1, 3, 64])
def test_17_both_modes_say_the_same(server: Service, path: str, per_step: int) -> None:
    body = body_of(server, path, hooks={"tokens_per_step": per_step}, max_tokens=37, temperature=0)
    whole = server.post(path, body)
    stream = server.stream(path, body | {"stream_options": {"include_usage": True}}).read()
    for usage in (whole.usage, stream.usage):
        assert usage["completion_tokens"] == 37
        assert usage["total_tokens"] == usage["prompt_tokens"] + 37
    assert whole.json()["choices"][0]["finish_reason"] == stream.finish_reason() == "length"
    assert stream.text() == whole.text() != ""


def test_20_the_first_chunk_of_each_choice_has_the_role(server: Service) -> None:
    stream = server.stream(CHAT, server.chat_body(n=4, max_tokens=6)).read()
    assert {stream.finish_reason(choice) for choice in range(4)} == {"length"}
    assert len({stream.text(choice) for choice in range(4)}) >= 1
