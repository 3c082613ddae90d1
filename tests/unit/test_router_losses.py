"""The laws of losses (behaviours 40 to 42, 79): when a peer is lost, all that ran there ends at once with the reason,
nothing is left of it, others do not notice, and its next start, or its awakening, begins with nothing.
"""

from __future__ import annotations

import math
import time

import pytest

from tests.unit.router_world import End, World, engine_info, idle, world
from wire.child import Control
from wire.link import Beat
from wire.messages import Abort, Accepted, HookReply, Rejected, StepOutput, Submit, Welcome


def die(found: World, end: End) -> None:
    """The process ends, and the launcher says so."""
    end.close()
    found.router.lost(Control("lost", role=end.role, index=end.index, generation=end.generation))


def check_lost(found: World, running: int, waiting: int) -> None:
    """What the sequences of a lost engine get: in-band if accepted, else a refusal."""
    found.until(lambda: found.ends_of(running) and found.rejections(waiting), "both end")
    assert [(end.reason, end.code) for end in found.ends_of(running)] == [("error", "engine_unavailable")]
    (rejected,) = found.rejections(waiting)
    assert (rejected.status, rejected.code) == (503, "engine_unavailable")
    assert 1 <= rejected.retry_after <= 60
    assert not found.ends_of(waiting)
    assert not found.rejections(running)


def test_a_lost_engine_ends_its_sequences_at_once_and_no_others() -> None:
    with world(ranks=2) as found:
        engines = found.engines()
        running, lost = found.running()
        other, kept = found.running()
        assert lost is not kept
        waiting, there = found.placed(session_key="s")
        while there is not lost:
            waiting, there = found.placed()
        die(found, lost)
        assert found.router.live.placement.loads[lost.index] == math.inf
        check_lost(found, running, waiting)
        kept.step((other, 3, [4]))
        found.until(lambda: found.text_of(other) == [1, 2, 3, 4], "the other goes on")
        assert {found.placed()[1] for _ in range(4)} == {kept}, "the lost rank is out of rotation"
        again = found.dial("engine", lost.index, engine_info())
        found.until(lambda: found.router.live.ranks[lost.index].ready, "it is back")
        assert found.placed()[1] is again, "with nothing on it, it is the least loaded"
        assert engines


@pytest.mark.parametrize("index", [0, 1])
def test_a_word_about_a_former_process_start_changes_nothing(index: int) -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        found.router.lost(Control("lost", role="engine", index=index, generation=engine.generation + 1 - index))
        engine.step((sid, 3, [4]))
        found.until(lambda: found.text_of(sid) == [1, 2, 3, 4], "it goes on")


def test_a_new_generation_takes_the_place_of_the_old_one() -> None:
    """The new process may say hello before anybody has told that the old one died."""
    with world() as found:
        (old,) = found.engines()
        running, _ = found.running()
        waiting, _ = found.placed()
        new = found.dial("engine", 0, engine_info())
        check_lost(found, running, waiting)
        idle(found)
        old.awake = True
        old.send(Accepted([waiting], [0]))
        old.step((running, 3, [4]))
        assert found.placed()[1] is new
        assert found.text_of(running) == [1, 2, 3], "the old one's words count no more"
        assert new.aborts() == [], "the new one is not told of what it never had"


def test_40_a_silent_engine_is_lost_and_comes_back_with_nothing() -> None:
    with world(ranks=2, engine_silence_seconds=5.0) as found:
        engines = found.engines()
        running, frozen = found.running()
        other, lively = found.running()
        waiting, there = found.placed()
        while there is not frozen:
            waiting, there = found.placed()
        frozen.awake = False
        for step in range(1, 7):  # the other one is heard of all the time
            found.skew = float(step)
            lively.step((other, 2 + step, [step]))
            found.until(lambda step=step: len(found.text_of(other)) == 3 + step, "no delay")  # type: ignore[misc]
        check_lost(found, running, waiting)
        assert {found.placed()[1] for _ in range(4)} == {lively}
        welcomes = len(frozen.of(Welcome))
        frozen.awake = True
        frozen.step((running, 3, [4]))  # what it says when it wakes
        found.until(lambda: len(frozen.of(Welcome)) == welcomes + 1, "it is told to start anew")
        found.until(lambda: found.router.live.ranks[frozen.index].ready, "and is back in rotation")
        found.until(lambda: {running, waiting} <= set(frozen.aborts()), "what it may still run is aborted")
        assert found.text_of(running) == [1, 2, 3]
        assert len(found.ends_of(running)) == 1
        assert found.placed()[1] is frozen
        assert engines


def test_40_a_silent_engine_that_has_nothing_to_say_comes_back_by_its_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wire.link.BEAT_SECONDS", 0.01)
    with world(engine_silence_seconds=5.0) as found:
        (engine,) = found.engines()
        found.skew = 6.0
        found.until(lambda: not found.router.live.ranks[0].ready, "it is lost")
        beat = Beat(found.context, engine.dialer, engine.generation)
        beat.start()
        try:
            found.until(lambda: found.router.live.ranks[0].ready, "it is back")
            found.skew = 60.0
            last = time.monotonic() + 0.2
            found.until(lambda: time.monotonic() > last, "heartbeats keep it there")
            assert found.router.live.ranks[0].ready
        finally:
            beat.stop()


def test_42_an_engine_that_is_gone_is_noticed_by_the_next_send() -> None:
    with world(ranks=2) as found:
        engines = found.engines()
        running, gone = found.running()
        listener, peer = found.router.listener, found.router.listener.by_name[f"engine.{gone.index}"]
        gone.close()
        deadline = time.monotonic() + 5
        while listener.send(peer, Abort([], "admin")):  # until the end of the connection has come through
            assert time.monotonic() < deadline
            time.sleep(0.001)
        survivor = next(end for end in engines if end is not gone)
        while found.placed(max_tokens=10)[1] is survivor and found.router.live.ranks[gone.index].ready:
            assert len(found.router.live.journal.sequences) < 20, "the lost rank was the least loaded long ago"
        assert {found.placed(max_tokens=10)[1] for _ in range(20)} == {survivor}, "each request finds the other rank"
        found.until(lambda: found.ends_of(running), "and what ran there ends")
        assert found.ends_of(running)[0].code == "engine_unavailable"


def test_42_what_was_sent_to_an_engine_that_died_just_then_does_not_wait() -> None:
    """Nobody says that the engine died, and nothing is sent to it any more: it is noticed all the same."""
    with world() as found:
        (engine,) = found.engines()
        sid, _ = found.placed()
        engine.close()
        started = time.monotonic()
        found.until(lambda: found.rejections(sid), "a refusal")
        assert time.monotonic() - started < 2
        idle(found)


def test_42_a_full_queue_in_the_middle_of_a_request_refuses_all_of_it() -> None:
    with world() as found:
        (engine,) = found.engines()
        real, room = found.router.listener.send, 2

        def send(peer, message, *frames):  # type: ignore[no-untyped-def]
            nonlocal room
            if isinstance(message, Submit):
                room -= 1
                if room < 0:
                    return False
            return real(peer, message, *frames)

        found.router.listener.send = send  # type: ignore[method-assign]
        sid = found.request(n=4)
        found.until(lambda: found.rejections(sid), "a refusal")
        assert found.rejections(sid)[0].code == "engine_unavailable"
        found.until(lambda: set(engine.aborts()) == {sid, sid + 1}, "what is there already is called back")
        engine.accept(sid, sid + 1)
        for choice in range(2):
            engine.finish(sid + choice, 0, "abort")
        idle(found)
        assert len(found.rejections(sid)) == 1
        assert found.tokenizer.of(Accepted) == []


def test_a_gap_on_an_engines_link_loses_the_engine() -> None:
    """The end of a sequence may be among what is missing: nobody must wait for it."""
    with world() as found:
        found.engines()
        sid, engine = found.running()
        engine.dialer._sent += 1
        engine.step((sid, 3, [4]))
        found.until(lambda: found.ends_of(sid), "its end")
        assert found.ends_of(sid)[0].code == "engine_unavailable"
        assert found.router.listener.counters.gaps == 1
        engine.send(Accepted([], []))
        found.until(lambda: found.router.live.ranks[0].ready, "it starts anew")
        found.until(lambda: sid in engine.aborts(), "and drops what it had")
        assert found.placed()[1] is engine


def test_a_lost_tokenizer_takes_its_requests_with_it() -> None:
    with world() as found:
        (engine,) = found.engines()
        other = found.dial("tokenizer", 1)
        theirs, _ = found.running(tokenizer=other)
        waiting, _ = found.placed(tokenizer=other)
        mine, _ = found.running()
        die(found, other)
        found.until(lambda: set(engine.aborts()) == {theirs, waiting}, "its sequences are aborted")
        engine.finish(theirs, 3, "abort")
        engine.finish(waiting, 0, "abort")
        engine.step((mine, 3, [4]))
        found.until(lambda: found.text_of(mine) == [1, 2, 3, 4], "others go on")
        assert list(found.router.live.journal.sequences) == [mine]
        again = found.dial("tokenizer", 1)
        sid, _ = found.running(tokenizer=again)
        found.until(lambda: found.text_of(sid, again) == [1, 2, 3], "the next one is served")
        assert not any(theirs in output.sids for output in again.of(StepOutput))


def test_a_tokenizers_next_process_start_ends_the_requests_of_the_former() -> None:
    with world() as found:
        (engine,) = found.engines()
        sid, _ = found.running()
        found.tokenizer.awake = False
        found.tokenizer = found.dial("tokenizer", 0)
        found.until(lambda: engine.aborts() == [sid], "its sequences are aborted")
        engine.finish(sid, 3, "abort")
        idle(found)
        assert found.running()


def test_a_lost_frontend_is_forgotten() -> None:
    with world(test_hooks=True) as found:
        (engine,) = found.engines()
        frontend = found.dial("frontend", 1)
        die(found, frontend)
        assert [peer.name for peer in found.router.listener.peers.values()] == ["tokenizer.0", "engine.0"]
        engine.send(HookReply(9, True))
        found.settle()


def test_a_request_of_choices_on_a_lost_engine_ends_once() -> None:
    with world() as found:
        (engine,) = found.engines()
        sid = found.request(n=3)
        engine.wait(Submit, 3)
        engine.accept(sid)
        found.until(lambda: found.tokenizer.of(Accepted), "one of them is accepted")
        die(found, engine)
        found.tokenizer.wait(Rejected)
        found.settle()
        assert len(found.rejections(sid)) == 1
        assert not any(found.ends_of(sid + choice) for choice in range(3)), "a refusal ends the whole request"
        idle(found)


def test_everything_goes_on_after_many_restarts() -> None:
    with world(ranks=2) as found:
        engines = found.engines()
        for number in range(6):
            sids = [found.running(session_key=f"s{number % 2}")[0] for _ in range(4)]
            victim = engines.pop(0)
            die(found, victim)
            engines.append(found.dial("engine", victim.index, engine_info()))
            found.until(lambda: all(rank.ready for rank in found.router.live.ranks), "it is back")
            for sid in list(found.router.live.journal.sequences):
                owner = next(end for end in engines if end.index == found.sequence(sid).rank.index)
                owner.finish(sid, 3)
            idle(found)
            found.settle()
            assert [len(found.ends_of(sid)) for sid in sids] == [1] * 4
