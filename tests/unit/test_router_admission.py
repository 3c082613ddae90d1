"""The laws of admission (behaviours 11, 39): places are counted by sequences, tokens by what waits; what is taken is
given back; the time to come again is the estimated wait, in 1..60 whole seconds.
"""

from __future__ import annotations

import random

import pytest

from router_proc.admission import Admission


def admission(running: int = 1, queued: int = 4, tokens: int = 0) -> Admission:
    found = Admission(queued, tokens)
    found.running_places = running
    return found


def test_39_places_are_what_can_run_and_what_may_wait() -> None:
    found = admission(running=1, queued=4)
    taken = 0
    while found.has_room(1, 10):
        found.take(1, 10)
        taken += 1
    assert taken == 5


def test_39_three_choices_take_three_places() -> None:
    found = admission(running=1, queued=4)
    found.take(1, 10)
    assert found.has_room(3, 10)
    found.take(3, 10)
    assert not found.has_room(3, 10)
    assert found.has_room(1, 10)
    assert not admission().has_room(6, 1), "more choices than places"


def test_39_tokens_that_wait_are_limited() -> None:
    found = admission(64, 64, tokens=600)
    found.take(1, 500)
    assert not found.has_room(1, 101)
    assert found.has_room(1, 100)
    found.started(500)
    assert found.has_room(1, 600)
    found.take(1, 600)
    assert not found.has_room(1, 1)


def test_a_prompt_above_the_limit_is_let_in_when_nothing_waits() -> None:
    found = admission(tokens=600)
    assert found.has_room(1, 5000)
    found.take(1, 5000)
    assert not found.has_room(1, 1)


def test_37_what_is_taken_is_given_back() -> None:
    source = random.Random(2)
    found = admission(8, 1000, 10**9)
    live: list[tuple[int, bool]] = []
    for _ in range(2000):
        if live and source.random() < 0.5:
            tokens, started = live.pop(source.randrange(len(live)))
            found.release(0 if started else tokens, source.choice([0.0, 0.5]))
        else:
            tokens = source.randrange(1, 1000)
            found.take(1, tokens)
            started = source.random() < 0.5
            if started:
                found.started(tokens)
            live.append((tokens, started))
    for tokens, started in live:
        found.release(0 if started else tokens, 0.0)
    found.check()


@pytest.mark.parametrize(
    ("seconds", "waiting", "running", "expected"),
    [(2.0, 4, 1, 8), (2.0, 4, 4, 2), (0.1, 1, 8, 1), (100.0, 10, 1, 60), (0.0, 3, 1, 1)],
)
def test_11_the_time_to_come_again_is_the_estimated_wait(
    seconds: float, waiting: int, running: int, expected: int
) -> None:
    found = admission(running, 100)
    found.take(1, 1)
    found.release(0, seconds)
    found.take(running + waiting - 1, 1)
    assert found.retry_after(1) == expected
