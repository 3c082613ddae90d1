"""Where requests go, seen from outside with real processes.

35: unrelated prompts spread evenly over idle ranks. 37: aborts leave no count behind. 38: a shared prefix stays at
home only while that is worth it. And the answer tells where and why.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.pipeline.harness import Service, service
from tests.pipeline.web import Stream, poll, together

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RANKS = 4
REASONS = {"session", "prefix", "first-message", "least-loaded", "resumed"}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Four mock ranks, two tokenizers, two frontends."""
    flags = ("--dp", str(RANKS), "--tokenizers", "2", "--frontends", "2", "--affinity-slack-tokens", "1000")
    with service(tmp_path_factory.mktemp("four"), *flags) as found:
        yield found


def route(headers: dict[str, str]) -> tuple[int, str]:
    found = re.fullmatch(r"rank=(\d+); reason=([a-z-]+)", headers["x-deepinfer-route"])
    assert found, headers["x-deepinfer-route"]
    assert found[2] in REASONS
    return int(found[1]), found[2]


def unrelated(server: Service, seed: int, **fields: Any) -> dict[str, Any]:
    source = random.Random(seed)
    return server.prompt_body([source.randrange(10, 250) for _ in range(40)], **{"max_tokens": 20, **fields})


def spread(server: Service, count: int, seed: int) -> Counter[int]:
    """Send `count` unrelated prompts at once, none of which ends before the last one is placed; ranks they went to."""
    fields: dict[str, Any] = {"hooks": {"step_ms": 20}, "max_tokens": 100}
    bodies = [unrelated(server, seed * 100_000 + number, **fields) for number in range(count)]
    answers = together([partial(server.post, COMPLETIONS, body, timeout=60) for body in bodies])
    assert {answer.status for answer in answers} == {200}
    return Counter(route(answer.headers)[0] for answer in answers)


def is_even(ranks: Counter[int], each: int) -> bool:
    return all(abs(ranks[rank] - each) <= 1 for rank in range(RANKS))


@pytest.mark.parametrize("each", [20, pytest.param(100, marks=pytest.mark.long)])
def test_35_unrelated_prompts_spread_evenly(four: Service, each: int) -> None:
    ranks = spread(four, each * RANKS, seed=each)
    assert is_even(ranks, each), ranks


@pytest.mark.parametrize(("aborts", "each"), [(80, 15), pytest.param(1000, 100, marks=pytest.mark.long)])
def test_37_aborts_leave_no_count_behind(four: Service, aborts: int, each: int) -> None:
    source = random.Random(3)

    def leave(number: int, lines: int) -> None:
        """Give up after some lines; below 0: before the status line."""
        if lines < 0:
            connection = four.connect()
            four._send(connection, "POST", COMPLETIONS, unrelated(four, 60_000_000 + number, max_tokens=300), None)
            connection.close()
            return
        stream = four.stream(COMPLETIONS, unrelated(four, 50_000_000 + number, hooks={"step_ms": 4}, max_tokens=300))
        for _ in range(lines):
            stream.next_line()
        stream.close()

    for start in range(0, aborts, 40):
        together([partial(leave, number, source.randrange(-2, 6)) for number in range(start, start + 40)])
    four.idle()
    inflight = four.metrics().each("engine_inflight")
    assert len(inflight) == RANKS
    assert set(inflight.values()) == {0.0}
    ranks = spread(four, each * RANKS, seed=1000 + aborts)
    assert is_even(ranks, each), ranks


def held(server: Service, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[Stream, int, str]:
    """A stream that stays open, and where it went."""
    stream = server.stream(COMPLETIONS, body, headers)
    assert stream.status == 200, stream.answer
    return stream, *route(stream.headers)


def test_38_a_shared_prefix_leaves_home_when_that_is_cheaper(four: Service) -> None:
    source = random.Random(38)
    prefix = [source.randrange(10, 250) for _ in range(256)]
    bodies = [
        four.prompt_body(
            prefix + [source.randrange(10, 250) for _ in range(600)], hooks={"step_ms": 300}, max_tokens=500
        )
        for _ in range(12)
    ]
    first, home, _ = held(four, bodies[0])
    first.first_token()
    second, rank, reason = held(four, bodies[1])
    assert (rank, reason) == (home, "prefix")
    second.first_token()
    # Each waits with 600 uncached tokens: home may have 1,000 more than the least loaded rank, so at most two more.
    found = together([partial(held, four, body) for body in bodies[2:]])
    for stream in (first, second, *(stream for stream, _, _ in found)):
        stream.close()
    counts = Counter(rank for _, rank, _ in found)
    assert set(counts) == set(range(RANKS)), counts
    assert max(counts.values()) <= min(counts.values()) + 3, counts


def test_38_a_session_returns_to_its_rank(four: Service) -> None:
    for name in ("X-Session-ID", "X-Correlation-ID"):
        ranks = []
        for number in range(4):
            stream, rank, reason = held(four, unrelated(four, 70_000 + number), {name: f"session-{name}"})
            stream.read()
            ranks.append(rank)
            assert reason == ("session" if number else "least-loaded")
            held(four, unrelated(four, 80_000 + number))[0].read()  # moves the least loaded one on
        assert len(set(ranks)) == 1, ranks
    for field in ("session_id", "prompt_cache_key"):
        found = [held(four, unrelated(four, 90_000 + number, **{field: "key"})) for number in range(3)]
        for stream, _, _ in found:
            stream.read()
        assert len({rank for _, rank, _ in found}) == 1


def test_37_metrics_are_right_with_several_frontends(four: Service) -> None:
    streams = [
        four.stream(COMPLETIONS, unrelated(four, 95_000 + number, hooks={"step_ms": 50}, max_tokens=300))
        for number in range(8)
    ]
    for stream in streams:
        stream.first_token()

    def is_eight(name: str) -> bool:
        return four.metrics().total(name) == 8

    for name in ("requests_running", "frontend_live_requests", "tokenizer_live_requests", "engine_inflight"):
        poll(f"{name} is 8", partial(is_eight, name), 5)
    for stream in streams:
        stream.close()
    four.idle()
