"""Faults and preemption seen by clients: a tiny random Llama in the torch engine, fp32, CPU, whole pipeline.

50: a fault at admission costs one request; a fault inside a step ends the engine within 1 s, each of its requests gets
engine_unavailable, and nobody waits for a timeout. 51: non-finite logits end their own sequence, and what lay in its
blocks is never used again. 52: in a pool for far fewer, four greedy and four seeded requests equal their solo runs.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import pytest

from tests.pipeline.harness import SLACK, Service, service
from tests.pipeline.test_prefix_cache_torch import random_llama
from tests.pipeline.web import Answer, Stream, poll, together

COMPLETIONS, HOOK = "/v1/completions", "/deepinfer/test/hook"
BLOCK, BLOCKS = 16, 40
FLAGS = ("--device", "cpu", "--dtype", "fp32", "--block-tokens", str(BLOCK))
DEATH_SECONDS = 1.0  # not stretched: this time is promised
RESTART_SECONDS = 15.0
FAIL_STEP = 350  # steps after which all have been placed and none has ended
SEEDED: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.1, "seed": 2, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "top_k": 40, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
]
GREEDY: list[dict[str, Any]] = [{"temperature": 0}] * 4
LENGTHS = (5, 16, 33, 70, 1, 31, 64, 40)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One rank with a pool of 640 tokens."""
    folder = tmp_path_factory.mktemp("one")
    flags = (*FLAGS, "--device-blocks", str(BLOCKS))
    with service(folder / "service", *flags, model=random_llama(folder / "model"), engine="torch") as found:
        yield found


def ids_of(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, 2000) for _ in range(count)]


def body_of(server: Service, number: int, length: int, tokens: int, **fields: Any) -> dict[str, Any]:
    """A prompt of random ids; greedy unless the fields say otherwise."""
    wishes = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, **fields}
    return server.prompt_body(ids_of(number, length), **wishes)


def post(server: Service, body: dict[str, Any]) -> Answer:
    return server.post(COMPLETIONS, body, timeout=100)


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """The numbers of a usage, without the reason of a miss, which tells what the cache has been through."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: usage[name] for name in names} | {"cached_tokens": cached}


def good(answer: Answer) -> tuple[str, dict[str, int]]:
    """Text and usage."""
    assert answer.status == 200, answer.body
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    return answer.text(), counts(answer.usage)


def start(server: Service, body: dict[str, Any]) -> Stream:
    stream = server.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}}, timeout=100)
    assert stream.status == 200, stream.answer
    return stream


def end(stream: Stream) -> tuple[str, dict[str, int]]:
    """Text and usage of a stream that ends well."""
    stream.read()
    assert stream.error is None, stream.error
    assert stream.finish_reason() == "length"
    (usage,) = [chunk["usage"] for chunk in stream.chunks if chunk.get("usage")]
    return stream.text(), counts(usage)


def hook(server: Service, name: str, rank: int = 0) -> dict[str, Any]:
    answer = server.post(HOOK, {"name": name, "rank": rank, "args": {}})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def cold(server: Service) -> None:
    """Nothing runs, the pools add up, nothing is cached."""
    server.idle()
    hook(server, "check_pools")
    hook(server, "flush_device_cache")


# --- 50: faults of an engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_50_a_fault_at_admission_costs_one_request(one: Service, streaming: bool) -> None:
    (engine,) = one.children("engine")
    bodies = [body_of(one, 5000 + number, 20 + 9 * number, 100) for number in range(3)]
    solo = [good(post(one, body)) for body in bodies]
    cold(one)
    streams = [start(one, body) for body in bodies]
    for stream in streams:
        stream.first_token()
    bad = body_of(one, 5009, 30, 40, hooks={"fail_admit": True}, stream=streaming)
    answer = post(one, bad)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert answer.seconds < 1.0 * SLACK
    assert b"choices" not in answer.body
    assert [end(stream) for stream in streams] == solo
    assert engine.is_running()
    assert good(post(one, body_of(one, 5009, 30, 40)))[1]["completion_tokens"] == 40
    cold(one)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two ranks, each of which runs three sequences at a time."""
    folder = tmp_path_factory.mktemp("two")
    flags = (*FLAGS, "--device-blocks", "200", "--dp", "2", "--max-running", "3")
    with service(folder / "service", *flags, model=random_llama(folder / "model"), engine="torch") as found:
        yield found


def rank_of(headers: dict[str, str]) -> int:
    found = re.fullmatch(r"rank=(\d+); reason=[a-z-]+", headers["x-deepinfer-route"])
    assert found, headers["x-deepinfer-route"]
    return int(found[1])


def first_death(engines: list[psutil.Process]) -> tuple[int, float]:
    """Which of these processes is the first one gone, and when."""

    def probe() -> int | None:
        for engine in engines:
            try:
                if engine.status() == psutil.STATUS_ZOMBIE:
                    return int(engine.pid)
            except psutil.NoSuchProcess:
                return int(engine.pid)
        return None

    pid = poll("an engine has ended", probe, 60)
    return pid, time.perf_counter()


def test_50_a_fault_inside_a_step_ends_the_engine_and_its_requests_at_once(two: Service) -> None:
    engines = two.children("engine")
    assert len(engines) == 2
    bodies = [body_of(two, 5100 + number, 30 + number, 500) for number in range(9)]
    streams = [start(two, body) for body in bodies[:4]]  # two in each rank
    failing = start(two, body_of(two, 5110, 25, 500, hooks={"fail_step": FAIL_STEP}))
    streams += [start(two, body) for body in bodies[4:8]]  # where it is: in the queue
    with ThreadPoolExecutor(2) as pool:
        death, last = pool.submit(first_death, engines), pool.submit(post, two, bodies[8])
        together([stream.read for stream in (failing, *streams)])
        (pid, died), whole = death.result(), last.result()

    assert failing.error is not None
    assert failing.error["code"] == "engine_unavailable"
    assert len(failing.deltas()) > FAIL_STEP // 4, "it ended too early"
    fault = max(at for line, at in zip(failing.lines, failing.times, strict=True) if b'"text"' in line)
    assert died - fault < DEATH_SECONDS
    assert f"(pid {pid}) died: StepFault: injected in step {FAIL_STEP} of a sequence" in two.log()
    rank = rank_of(failing.headers)
    theirs = [stream for stream in streams if rank_of(stream.headers) == rank]
    assert {rank_of(stream.headers) for stream in streams} == {0, 1}
    assert any(not stream.deltas() for stream in theirs), "none of them was in the queue"
    assert any(stream.deltas() for stream in theirs), "none of them ran"
    for stream in (failing, *theirs):
        assert stream.error is not None
        assert stream.error["code"] == "engine_unavailable"
        assert stream.times[-1] - fault < DEATH_SECONDS * SLACK, "it waited for a timeout"

    poll("the engine is back", two.healthy, RESTART_SECONDS * SLACK)
    after = two.children("engine")
    assert [engine.pid for engine in engines if engine not in after] == [pid]
    solo = [good(post(two, body)) for body in bodies]
    assert len({text for text, _ in solo}) == len(solo)
    for stream, (text, usage) in zip(streams, solo, strict=False):
        if stream in theirs:
            assert text.startswith(stream.text().rstrip("\ufffd"))
        else:
            assert (stream.text(), stream.error) == (text, None)
            assert stream.chunks[-1]["usage"]["completion_tokens"] == usage["completion_tokens"] == 500
    if whole.status == 200:
        assert whole.text() == solo[8][0]
    else:
        assert (whole.status, whole.error["code"]) == (503, "engine_unavailable")
    answers = together([partial(post, two, body) for body in bodies])
    assert [good(answer)[0] for answer in answers] == [text for text, _ in solo]
    assert {rank_of(answer.headers) for answer in answers} == {0, 1}
    for number in (0, 1):
        hook(two, "check_pools", number)


# --- 51: logits that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nan_step", [1, 2, 45])
@pytest.mark.parametrize("streaming", [False, True])
def test_51_non_finite_logits_end_their_own_sequence(one: Service, streaming: bool, nan_step: int) -> None:
    """At the first id, at the next one, and when blocks of its output are full."""
    others = [body_of(one, 5200, 22, 110), body_of(one, 5201, 40, 110, **SEEDED[1])]
    length = 4 * BLOCK + 5
    body = body_of(one, 5210 + nan_step, length, 60)
    cold(one)
    expected = [good(post(one, other)) for other in others]
    before = good(post(one, {**body, "max_tokens": nan_step - 1, "prefix_cache": False}))[0] if nan_step > 1 else ""
    text, usage = good(post(one, body))  # its prompt is cached from now on
    assert good(post(one, body)) == (text, usage | {"cached_tokens": 4 * BLOCK})
    hook(one, "flush_device_cache")
    good(post(one, body))
    running = [start(one, other) for other in others]
    for stream in running:
        stream.first_token()
    fault = {"hooks": {"nan_step": nan_step}}
    if streaming:
        failing = start(one, body_of(one, 5210 + nan_step, length, 60, **fault)).read()
        assert failing.error is not None
        assert failing.error["code"] == "internal_error"
        assert failing.finish_reason() is None
        assert before.startswith(failing.text().rstrip("\ufffd")), "no id of the fault or after it is shown"
    else:
        answer = post(one, body_of(one, 5210 + nan_step, length, 60, **fault))
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert b"choices" not in answer.body
    assert good(post(one, body)) == (text, usage), "nothing of it is found again: neither new blocks nor reused ones"
    assert [end(stream) for stream in running] == expected
    cold(one)


# --- 52: preemption ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [180, pytest.param(300, marks=pytest.mark.long)])
def test_52_preempted_requests_equal_their_solo_runs(one: Service, tokens: int) -> None:
    """All eight at once, the greedy ones, the seeded ones; then all again, with what is left in the cache."""
    bodies = [
        body_of(one, 5300 + number, length, tokens, **wish)
        for number, (length, wish) in enumerate(zip(LENGTHS, GREEDY + SEEDED, strict=True))
    ]
    cold(one)
    solo = [good(post(one, body)) for body in bodies]
    assert len({text for text, _ in solo}) == len(solo)
    assert all(usage["completion_tokens"] == tokens for _, usage in solo)
    for first, last, least in ((0, 8, 4), (0, 4, 1), (4, 8, 1)):
        cold(one)
        before = one.metrics().total("preemptions_total")
        streams = together([partial(start, one, body) for body in bodies[first:last]])
        assert together([partial(end, stream) for stream in streams]) == solo[first:last]
        wait_preempted(one, before + least)
    before = one.metrics().total("preemptions_total")
    answers = together([partial(post, one, body) for body in bodies])
    assert [good(answer)[0] for answer in answers] == [text for text, _ in solo]
    wait_preempted(one, before + 1)
    cold(one)


def wait_preempted(server: Service, count: float) -> None:
    """The engine's counter gets there (its numbers are sent at intervals)."""
    poll(f"{count:g} preemptions", lambda: server.metrics().total("preemptions_total") >= count, 2 * SLACK)
