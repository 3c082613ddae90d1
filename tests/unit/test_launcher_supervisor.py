"""80-83, with children that only follow orders: a failed start ends everything at once and says why; a dead child is
started again and all others hear of it; a drain ends when the last frontend ends; nothing outlives the launcher.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launcher_world import top

SERVICE: dict[str, dict[str, Any]] = {
    "router.0": {},
    "frontend.0": {"drain_ends": 0.2},
    "frontend.1": {"drain_ends": 0.6},
    "tokenizer.0": {},
    "engine.0": {},
}


def with_child(name: str, **fields: Any) -> dict[str, dict[str, Any]]:
    return {**SERVICE, name: {**SERVICE[name], **fields}}


# --- 81 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        ("exception", "RuntimeError: the weights are gone"),
        ("error", "no such weights: x.safetensors"),
        ("exit 0", "it ended with exit code 0 and no word"),
        ("exit 3", "it ended with exit code 3 and no word"),
        ("signal", "killed by SIGKILL"),
    ],
)
def test_81_a_child_that_fails_to_start_ends_the_start(tmp_path: Path, fail: str, reason: str) -> None:
    with top(tmp_path, with_child("tokenizer.0", fail=fail)) as tested:
        assert tested.end(15) == 1
        assert tested.errors() == [f"deepinfer: tokenizer.0 failed to start: {reason}"]
        assert "serving" not in tested.out.read_text()
        assert len(tested.starts("tokenizer.0")) == 1, "a first start is not tried again"


def test_81_a_child_that_hangs_fails_at_the_limit(tmp_path: Path) -> None:
    with top(tmp_path, with_child("engine.0", fail="hang"), start_seconds=3.0) as tested:
        assert tested.end(15) == 1
        (line,) = tested.errors()
        assert line.startswith("deepinfer: engine.0 failed to start: it was not ready after 3 s")


def test_a_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    with top(tmp_path, with_child("engine.0", fail="hang")) as tested:
        tested.until("the engine hangs", lambda: bool(tested.starts("engine.0")))
        tested.process.send_signal(signal.SIGINT)
        assert tested.end(10) == 0
        assert not tested.errors()


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SERVICE))
def test_a_dead_child_starts_again_and_the_others_hear_of_it(tmp_path: Path, name: str) -> None:
    with top(tmp_path, SERVICE) as tested:
        tested.until_serving()
        ((generation, pid),) = tested.starts(name)
        os.kill(pid, signal.SIGKILL)
        tested.until_said(f"{name} is ready again")
        (_, (second, second_pid)) = tested.starts(name)
        assert second != generation
        assert second_pid != pid
        told = [f"{other} lost {name} {generation}" for other in SERVICE if other != name]
        tested.until("all others were told", lambda: set(told) <= set(tested.notes()), 5)
        assert f"{name} lost {name} {generation}" not in tested.notes()
        assert all(len(tested.starts(other)) == 1 for other in SERVICE if other != name)


def test_the_third_death_in_a_row_before_ready_ends_the_service(tmp_path: Path) -> None:
    with top(tmp_path, with_child("engine.0", fail="error", fail_from=2)) as tested:
        tested.until_serving()
        os.kill(tested.starts("engine.0")[0][1], signal.SIGKILL)
        assert tested.end(10) == 1
        assert len(tested.starts("engine.0")) == 4
        reason = "engine.0 died 3 times in a row before it was ready: no such weights: x.safetensors"
        assert tested.errors()[-1] == f"deepinfer: {reason}"


def test_two_deaths_and_a_good_start_are_forgiven(tmp_path: Path) -> None:
    with top(tmp_path, with_child("engine.0", fail="exit 3", fail_from=2, good=[4, 7])) as tested:
        tested.until_serving()
        for times in (1, 2):
            os.kill(tested.starts("engine.0")[-1][1], signal.SIGKILL)
            tested.until_said("engine.0 is ready again", times)
        assert tested.process.poll() is None
        assert len(tested.starts("engine.0")) == 7


def test_a_child_that_hangs_at_a_restart_is_started_anew(tmp_path: Path) -> None:
    children = with_child("tokenizer.0", fail="hang", fail_from=2, good=[3])
    with top(tmp_path, children, start_seconds=2.0) as tested:
        tested.until_serving()
        os.kill(tested.starts("tokenizer.0")[0][1], signal.SIGKILL)
        tested.until_said("tokenizer.0 is ready again")
        assert len(tested.starts("tokenizer.0")) == 3


# --- 83 ---------------------------------------------------------------------------------------------------------------


def test_83_the_drain_ends_with_the_last_frontend(tmp_path: Path) -> None:
    with top(tmp_path, SERVICE, drain_seconds=20.0) as tested:
        tested.until_serving()
        started = time.monotonic()
        tested.process.send_signal(signal.SIGTERM)
        assert tested.end(10) == 0
        assert 0.6 <= time.monotonic() - started < 5, "as soon as the last frontend ended, not at the end of the time"
        notes = tested.notes()
        last = max(notes.index("end frontend.0"), notes.index("end frontend.1"))
        for other in ("router.0", "tokenizer.0", "engine.0"):
            assert notes.index(f"end {other}") > last, "the rest goes on until then"
            assert not [line for line in notes if line.startswith(f"{other} drain")]


def test_83_the_drain_has_an_end(tmp_path: Path) -> None:
    with top(tmp_path, with_child("frontend.0", drain_ends=-1.0), drain_seconds=0.5) as tested:
        tested.until_serving()
        tested.process.send_signal(signal.SIGTERM)
        assert tested.end(12) == 0


def test_83_a_second_signal_ends_all_within_3_s(tmp_path: Path) -> None:
    behaviour = {name: {"deaf": True} for name in SERVICE}
    with top(tmp_path, behaviour, drain_seconds=600.0) as tested:
        tested.until_serving()
        tested.process.send_signal(signal.SIGTERM)
        tested.until("the drain began", lambda: any("drain" in line for line in tested.notes()))
        os.kill(tested.starts("engine.0")[0][1], signal.SIGSTOP)
        started = time.monotonic()
        tested.process.send_signal(signal.SIGTERM)
        assert tested.end(20) == 0
        assert time.monotonic() - started < 3


def test_frozen_children_do_not_stop_the_end(tmp_path: Path) -> None:
    with top(tmp_path, SERVICE) as tested:
        tested.until_serving()
        os.kill(tested.starts("engine.0")[0][1], signal.SIGSTOP)
        tested.process.send_signal(signal.SIGTERM)
        assert tested.end(10) == 0


# --- 80 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["first child", "hang", "serving", "draining"])
def test_80_nothing_outlives_a_killed_launcher(tmp_path: Path, moment: str) -> None:
    children = with_child("engine.0", fail="hang") if moment == "hang" else with_child("engine.0", deaf=True)
    with top(tmp_path, children, drain_seconds=600.0) as tested:
        if moment == "first child":
            tested.until("a child runs", lambda: len(tested.left()) > 1)
        elif moment == "hang":
            tested.until("the engine hangs", lambda: bool(tested.starts("engine.0")))
        else:
            tested.until_serving()
        if moment == "draining":
            tested.process.send_signal(signal.SIGTERM)
            tested.until("the drain began", lambda: any("drain" in line for line in tested.notes()))
        tested.process.kill()
        tested.process.wait(5)
        tested.until("all have ended", lambda: not tested.left(), 5)
        assert not tested.run_dir.exists(), "its folder of sockets is gone"
