"""The engine's loop over real links: what is accepted, published, refused, aborted, repeated, and told.

42: what cannot be sent is kept and merged. 43: an abort is answered once. 44: too long is refused. 50: an error in
admission is one sequence's own. And: an idle engine waits in its poll, a new router finds an engine without a past.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_proc import outbox as outbox_module
from engine_proc.outbox import Outbox
from engine_proc.scheduler import Output
from engine_proc.service import CHECK_SECONDS, TICK_SECONDS
from tests.unit.engine_world import World, params, prompt_of
from tests.unit.loop_world import LoopWorld, loop_world
from wire.child import Control
from wire.link import Dialer
from wire.messages import Abort, Accepted, Finished, Hello, Message, Refused, Resync, Stats, StepOutput, Submit, Usage


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="dis") as folder:
        yield Path(folder)


@pytest.fixture
def world(short: Path) -> Iterator[LoopWorld]:
    with loop_world(short) as found:
        yield found


def test_a_request_is_accepted_then_answered_then_ended(world: LoopWorld) -> None:
    sid = world.submit(prompt_of(1, 300), params(20))
    (end,) = world.ended(sid)
    kinds = [type(message) for message, _ in world.inbox if not isinstance(message, Stats | Hello)]
    assert kinds == [Accepted, *[StepOutput] * 20]
    assert end == Finished(sid, 0, "length", 20, Usage(300, 0, 0, 0, "cold"))
    assert len(world.ids[sid]) == 20
    assert world.of(StepOutput)[-1].finished == [end], "the end comes with the last id"


def test_one_message_per_step_whatever_runs(world: LoopWorld) -> None:
    sids = [world.submit(prompt_of(seed, 10), params(30)) for seed in range(8)]
    world.ended(*sids)
    assert len(world.of(StepOutput)) <= 30 + 8
    assert max(len(message.sids) for message in world.of(StepOutput)) == 8


def test_ids_depend_on_the_prompt_alone(world: LoopWorld) -> None:
    prompts = [prompt_of(seed, 5 + 50 * seed) for seed in range(8)]
    together = [world.submit(prompt, params(25)) for prompt in prompts]
    world.ended(*together)
    for prompt, sid in zip(prompts, together, strict=True):
        alone = world.submit(prompt, params(25, seed=9))
        world.ended(alone)
        assert world.ids[alone] == world.ids[sid]
    assert len({tuple(world.ids[sid]) for sid in together}) == 8


def test_a_sequence_is_resumed_where_it_was(world: LoopWorld) -> None:
    sid = world.submit(prompt_of(1, 40), params(20))
    world.ended(sid)
    later = world.submit(prompt_of(1, 40), params(20), produced=world.ids[sid][:13], attempt=3)
    world.ids[later], world.attempts[later] = world.ids[sid][:13], 3
    (end,) = world.ended(later)
    assert world.ids[later] == world.ids[sid]
    assert (end.completion_tokens, end.attempt) == (20, 3)


def test_a_new_attempt_takes_the_place_of_an_older_one(world: LoopWorld) -> None:
    sid = world.submit(prompt_of(1, 10), params(500, hooks={"step_ms": 5}))
    world.until(lambda: len(world.ids.get(sid, [])) > 3, "it runs")
    world.submit(prompt_of(1, 10), params(500), attempt=0, sid=sid)  # the same again: nothing happens
    world.submit(prompt_of(1, 10), params(5), attempt=1, sid=sid)
    world.until(lambda: sid in world.ends and world.ends[sid].attempt == 1, "the new one ends")
    assert world.ends[sid].reason == "length"
    assert len(world.ids[sid]) == 5
    ends = [end for message in world.of(StepOutput) for end in message.finished]
    assert [(end.attempt, end.reason) for end in ends] == [(0, "abort"), (1, "length")]
    assert world.engine.stats.bad_requests == 1


@pytest.mark.parametrize(
    "frames",
    [
        (b"", b"", b""),
        (b"\x05\0\0\0", b""),
        (b"\x05\0\0", b"", b""),
        (b"\x05\0\0\0", b"x" * 31, b""),
        (b"\x05\0\0\0", b"x" * 32, b""),
        (b"\xff\xff\xff\xff", b"", b""),
        (b"\x00\x08\0\0", b"", b""),
        (b"\x05\0\0\0", b"", b"\x00\x08\0\0"),
    ],
    ids=["no prompt", "two frames", "half an id", "half a key", "a key too many", "-1", "V", "V produced"],
)
def test_a_request_that_is_no_good_is_counted_and_answered(world: LoopWorld, frames: tuple[bytes, ...]) -> None:
    world.send(Submit(77 << 8, 0, 1, "", params()), *frames)
    (end,) = world.ended(77 << 8)
    assert (end.reason, end.code) == ("error", "internal_error")
    assert world.engine.stats.bad_requests == 1
    assert world.accepted() == []
    good = world.submit([5, 2047], params(3))
    assert world.ended(good)[0].reason == "length"


def test_44_more_than_the_pool_holds_is_refused(short: Path) -> None:
    with loop_world(short, device_blocks=4) as world:
        assert world.info.context_length == 512
        world.submit(prompt_of(1, 500), params(13))
        world.until(lambda: bool(world.rejected()), "it is refused")
        (refusal,) = world.rejected()
        assert (refusal.rid, refusal.status, refusal.code) == (256, 400, "context_length_exceeded")
        assert "maximum context length is 512 tokens" in refusal.text
        assert world.accepted() == []
        fits = world.submit(prompt_of(1, 500), params(12))
        assert world.ended(fits)[0].completion_tokens == 12


@pytest.mark.parametrize("state", ["queued", "running"])
def test_43_an_abort_ends_a_sequence_once(short: Path, state: str) -> None:
    with loop_world(short, max_running=1) as world:
        holder = world.submit(prompt_of(1, 10), params(1000, hooks={"step_ms": 2}))
        queued = world.submit(prompt_of(2, 10), params(5))
        world.until(lambda: holder in world.ids and queued in world.accepted(), "one runs, one waits")
        target = queued if state == "queued" else holder
        world.send(Abort([target, 999 << 8, target], "client"))
        (end,) = world.ended(target)
        assert (end.reason, end.code) == ("abort", "")
        assert end.completion_tokens == len(world.ids.get(target, []))
        world.send(Abort([target], "client"))
        if state == "queued":
            world.send(Abort([holder], "client"))
        world.ended(holder, queued)
        world.until(lambda: world.engine.stats.late_aborts == 3, "aborts of unknown ones change nothing")


def test_50_an_error_in_admission_is_that_sequences_own(world: LoopWorld) -> None:
    other = world.submit(prompt_of(1, 10), params(40, hooks={"step_ms": 2}))
    for hooks in ({"fail_admit": True}, {"nan_step": "x"}):
        bad = world.submit(prompt_of(2, 10), params(5, hooks=hooks))
        (end,) = world.ended(bad)
        assert (end.reason, end.code, end.usage.prompt_tokens) == ("error", "internal_error", 10)
        assert bad not in world.accepted(), "it failed before it was in the queue"
    wrong = [world.submit(prompt_of(2, 10), params(5, hooks={"script": ["x"]})), other]
    assert [end.code for end in world.ended(*wrong)] == ["internal_error", ""]


def test_50_a_fault_inside_a_step_is_not_caught(short: Path) -> None:
    world = LoopWorld(short)
    try:
        world.submit(prompt_of(1, 10), params(9, hooks={"fail_step": 4}))
        with pytest.raises(RuntimeError, match="injected in step 4"):
            world.until(lambda: False, "the fault")
        deadline = time.monotonic() + 5
        while len(world.ids.get(256, [])) < 3 and time.monotonic() < deadline:
            world.read()
        assert len(world.ids[256]) == 3
    finally:
        world.close()


def test_hooks_do_nothing_when_they_are_off(short: Path) -> None:
    with loop_world(short, test_hooks=False) as world:
        sid = world.submit(prompt_of(1, 10), params(4, hooks={"fail_step": 1, "fail_admit": True, "script": [9]}))
        assert world.ended(sid)[0].reason == "length"
        reply = world.hook("check_pools")
        assert (reply.ok, reply.result) == (False, "test hooks are off")


# --- the router comes and goes ----------------------------------------------------------------------------------------


def test_a_new_router_finds_an_engine_without_a_past(world: LoopWorld) -> None:
    old = [world.submit(prompt_of(seed, 10), params(5000)) for seed in range(12)]
    world.until(lambda: len(world.ids) == 8, "they run")
    world.restart_router()
    world.until(lambda: world.peer is not None, "the engine says hello again")
    world.until(lambda: world.engine.idle, "everything is dropped")
    assert world.peer is not None and world.peer.engine == world.info
    assert not [sid for sid in old if sid in world.ends], "ends for a router that does not know of them"
    fresh = world.submit(prompt_of(1, 10), params(4))
    assert world.ended(fresh)[0].reason == "length"


def test_the_launchers_word_is_enough(world: LoopWorld) -> None:
    world.submit(prompt_of(1, 10), params(5000))
    world.until(lambda: bool(world.ids), "it runs")
    world.engine.lost(Control("lost", role="router", index=0, generation=99))
    world.engine.lost(Control("lost", role="frontend", index=0, generation=7))
    assert not world.engine.idle
    world.engine.lost(Control("lost", role="router", index=0, generation=7))
    assert world.engine.idle


def test_a_router_that_refuses_is_reported(world: LoopWorld) -> None:
    assert world.engine._handle(Refused("rank 0 does not fit"), [], 0.0)
    assert world.engine.refused == "rank 0 does not fit"


def test_missing_ids_are_sent_again(world: LoopWorld) -> None:
    sid = world.submit(prompt_of(1, 10), params(40, hooks={"step_ms": 5}, logprobs=1))
    world.until(lambda: len(world.ids.get(sid, [])) > 10, "it runs")
    expected = world.ids[sid][3:]
    world.inbox.clear()
    world.records.clear()
    world.send(Resync([sid, 77 << 8], [3, 0]))
    world.until(lambda: any(3 in item.offsets for item in world.of(StepOutput)), "ids come again")
    assert world.ids[sid][3 : 3 + len(expected)] == expected
    assert next(item for item in world.records if item.offset == 3).tokens
    (end,) = world.ended(sid)
    assert len(world.ids[sid]) == end.completion_tokens == 40


# --- what cannot be sent ----------------------------------------------------------------------------------------------


class Stubborn:
    """A link that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.open = False
        self.sent: list[tuple[Message, tuple[bytes, ...]]] = []

    def send(self, message: Message, *frames: bytes) -> bool:
        if self.open:
            self.sent.append((message, frames))
        return self.open


def produce(world: World, outbox: Outbox) -> None:
    """One step of a world into an outbox."""
    step = world.scheduler.schedule()
    if step is not None:
        outbox.put(world.scheduler.complete(step, world.runner.launch(step.plan()).result()))


def test_42_what_is_not_taken_is_kept_and_merged() -> None:
    world, link = World(), Stubborn()
    dialer: Dialer = link  # type: ignore[assignment]  # it sends like one
    outbox = Outbox(dialer)
    sequences = [world.sequence(prompt_of(seed, 9), params(6 + 4 * seed, logprobs=0)) for seed in range(3)]
    for sequence in sequences:
        outbox.accept(sequence)
        world.scheduler.submit(sequence)
    for _ in range(8):
        produce(world, outbox)
    assert outbox.blocked and not link.sent
    link.open = True
    produce(world, outbox)
    kinds = [type(message) for message, _ in link.sent]
    assert kinds == [Accepted, StepOutput]
    merged, (ids,) = link.sent[1]
    assert isinstance(merged, StepOutput)
    assert merged.offsets == [0, 0, 0]
    assert merged.counts == [6, 9, 9]
    assert [end.sid for end in merged.finished] == [sequences[0].sid]
    assert np.frombuffer(ids, np.int32).tolist() == [token for item in sequences for token in item.produced]
    assert [(item.offset, len(item.tokens)) for item in merged.logprobs] == [(0, 6), (0, 9), (0, 9)]
    produce(world, outbox)
    last, _ = link.sent[2]
    assert isinstance(last, StepOutput) and last.offsets == [9, 9]
    assert not outbox.blocked


def test_42_order_is_kept() -> None:
    world, link = World(), Stubborn()
    dialer: Dialer = link  # type: ignore[assignment]  # it sends like one
    outbox = Outbox(dialer)
    first = Output([], [], b"", [], [Finished(1, 0, "abort", 0, Usage(1))])
    second = Output([], [], b"", [], [Finished(2, 0, "abort", 0, Usage(1))])
    outbox.put(first)
    link.open = True
    outbox.put(second)
    ends = [end.sid for message, _ in link.sent if isinstance(message, StepOutput) for end in message.finished]
    assert ends == [1, 2]
    assert world.scheduler.take_finished() == []


def test_42_a_full_outbox_stops_the_steps(world: LoopWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MOST_KEPT", 64)
    send = world.engine.link.send
    monkeypatch.setattr(world.engine.link, "send", lambda *_: False)
    sid = world.submit(prompt_of(1, 10), params(500))
    for _ in range(200):
        world.engine.turn(0.001)
    assert world.engine.outbox.full
    steps = world.engine.stats.steps
    assert 64 <= steps < 80
    monkeypatch.setattr(world.engine.link, "send", send)
    (end,) = world.ended(sid)
    assert len(world.ids[sid]) == end.completion_tokens == 500


# --- numbers, checks, idleness ----------------------------------------------------------------------------------------


def test_numbers_are_told_when_they_change(world: LoopWorld) -> None:
    sid = world.submit(prompt_of(1, 300), params(400, hooks={"step_ms": 2}))
    world.until(lambda: sid in world.ids, "it runs")
    busy = world.stats()
    assert busy.gauges["requests_running"] == 1
    assert busy.gauges["gpu_pages_pinned"] >= 3
    world.ended(sid)
    again = world.submit(prompt_of(1, 300), params(2))
    world.ended(again)
    world.until(lambda: world.of(Stats)[-1].gauges["requests_running"] == 0, "it tells the end")
    last = world.of(Stats)[-1]
    assert last.counters["prefix_tokens_queried_total"] == 600
    assert last.counters["prefix_tokens_reused_total"] == 256
    assert last.gauges["gpu_pages_pinned"] == 0
    assert last.gauges["gpu_pages_free"] + last.gauges["gpu_pages_cached"] == last.gauges["gpu_pages_total"] == 256
    assert sum(last.histograms["queue_seconds"].counts) == 2
    assert last.detail["scheduler"]["admitted"] == 2
    for name in ("swa_slots_total", "host_pages_total", "host_pages_pinned", "requests_waiting"):
        assert last.gauges[name] == 0
    assert 'ipc_gaps_total{process="engine.0"}' in last.counters


def test_an_idle_engine_waits_and_is_silent(world: LoopWorld) -> None:
    sid = world.submit(prompt_of(1, 300), params(5))
    world.ended(sid)
    settled = time.monotonic() + CHECK_SECONDS + 3 * TICK_SECONDS
    world.until(lambda: time.monotonic() > settled, "it settles")
    assert world.engine._checked, "the pools were not checked"
    told = len(world.of(Stats))
    spent, began = time.process_time(), time.monotonic()
    turns = 0
    while time.monotonic() - began < 1.0:
        world.engine.turn(0.5)
        turns += 1
    assert turns <= 4
    assert time.process_time() - spent < 0.1
    world.read()
    assert len(world.of(Stats)) == told


def test_damage_is_found_when_idle(short: Path) -> None:
    world = LoopWorld(short)
    try:
        world.ended(world.submit(prompt_of(1, 300), params(5)))
        world.engine.scheduler.pool._free.pop()
        with pytest.raises(Exception, match="block"):
            world.until(lambda: False, "the check")
    finally:
        world.close()


def test_hooks_reach_the_pool(world: LoopWorld) -> None:
    prompt = prompt_of(1, 300)

    def cached() -> int:
        return world.ended(world.submit(prompt, params(1)))[0].usage.cached_tokens

    assert [cached(), cached()] == [0, 256]
    assert world.hook("check_pools").result == {"total": 256, "free": 254, "cached": 2, "pinned": 0}
    assert world.hook("flush_device_cache").result == {"dropped": 2}
    assert [cached(), cached()] == [0, 256]
    assert world.hook("drop_cached_block").result == {"dropped": 1}
    assert cached() == 0
    assert not world.hook("no_such_hook").ok
    assert not world.hook("drop_cached_block", key="zz").ok
    assert not world.hook("hang", seconds=-1).ok
    began = time.monotonic()
    assert world.hook("hang", seconds=0.2).ok
    world.turn()
    assert time.monotonic() - began >= 0.2
