"""The law of the way out (behaviour 42): every id reaches its tokenizer once and in order, whatever comes twice, late,
all at once or not at all; what a tokenizer cannot take now is kept.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from router_proc.outputs import REPAIR_SECONDS
from tests.unit.router_world import idle, ids_of, world
from wire.messages import (
    Abort,
    Accepted,
    Finished,
    Rejected,
    Resync,
    SequenceLogprobs,
    StepOutput,
    Submit,
    TokenLogprobs,
    Usage,
)

# --- out --------------------------------------------------------------------------------------------------------------


def test_one_step_is_passed_on_as_it_is() -> None:
    with world() as found:
        (engine,) = found.engines()
        sids = [found.placed()[0] for _ in range(3)]
        engine.accept(*sids)
        records = [SequenceLogprobs(sids[1], 0, [TokenLogprobs(-0.5, [4], [-0.5])] * 2)]
        ended = [Finished(sids[2], 0, "length", 1, Usage(10, 0, 0, 0, "cold"))]
        engine.step((sids[0], 0, [1]), (sids[1], 0, [2, 3]), (sids[2], 0, [4]), logprobs=records, finished=ended)
        (output,) = found.tokenizer.wait(StepOutput)
        assert output == StepOutput(sids, [0] * 3, [0] * 3, [1, 2, 1], ended, records)
        assert found.tokenizer.frames_of(StepOutput) == [[ids_of(1, 2, 3, 4)]]


def test_an_end_that_the_router_decides_goes_out_beside_a_step() -> None:
    """Both in one drain: the step must not be passed on as if it were all."""
    with world(ranks=2) as found:
        found.engines()
        late, _ = found.running(timeout=5.0)
        other, engine = found.running()
        engine.step((other, 3, [4]))
        assert found.router.listener.socket.poll(1000)
        found.skew = 5.5
        found.until(lambda: found.ends_of(late), "its end")
        assert found.text_of(other) == [1, 2, 3, 4]
        assert (
            len([message for message in found.tokenizer.of(StepOutput) if 4 in message.offsets or 3 in message.offsets])
            == 1
        )


def test_logprobs_that_come_after_their_ids_end_the_sequence() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        engine.step(logprobs=[SequenceLogprobs(sid, 0, [TokenLogprobs(-1.0, [], [])] * 3)])
        found.until(lambda: found.ends_of(sid), "its end")
        assert found.ends_of(sid)[0].code == "internal_error"


def test_a_step_for_two_tokenizers_is_told_apart() -> None:
    with world() as found:
        (engine,) = found.engines()
        other = found.dial("tokenizer", 1)
        mine, theirs = found.placed()[0], found.placed(tokenizer=other)[0]
        engine.accept(mine, theirs)
        engine.step((mine, 0, [1]), (theirs, 0, [2, 3]))
        found.until(lambda: found.text_of(mine) and found.text_of(theirs, other), "both get their ids")
        found.settle()
        assert [output.sids for output in found.tokenizer.of(StepOutput)] == [[mine]]
        assert [output.sids for output in other.of(StepOutput)] == [[theirs]]
        assert other.frames_of(StepOutput) == [[ids_of(2, 3)]]


def test_a_backlog_becomes_one_message_per_tokenizer() -> None:
    """Steps of two engines for sequences of two tokenizers, all read at once."""
    with world(ranks=2) as found:
        engines = found.engines()
        other = found.dial("tokenizer", 1)
        sids = {end: [found.placed(tokenizer=end)[0] for _ in range(4)] for end in (found.tokenizer, other)}
        where = {item.sid: engine for engine in engines for item in engine.of(Submit)}
        for engine in engines:
            mine = [sid for sid, end in where.items() if end is engine]
            assert len(mine) == 4
            engine.accept(*mine)
        found.until(lambda: all(found.sequence(sid).accepted for sid in where), "all are accepted")
        for number in range(50):
            for engine in engines:
                engine.step(*[(sid, number, [1000 * (sid & 0xFFFF) + number]) for sid in where if where[sid] is engine])
        found.router.listener.socket.poll(1000)
        deadline = time.monotonic() + 10
        while sum(len(found.sequence(sid).produced) for sid in where) < 50 * len(where):
            assert time.monotonic() < deadline
            found.step()
        found.settle()
        for end, theirs in sids.items():
            for sid in theirs:
                assert found.text_of(sid, end) == [1000 * (sid & 0xFFFF) + number for number in range(50)]
            outputs = end.of(StepOutput)
            assert len(outputs) < 25, "a hundred steps came in a few drains"
            assert {sid for output in outputs for sid in output.sids} == set(theirs), "only its own sequences"


def test_what_comes_again_is_skipped() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        engine.step((sid, 0, [1, 2]))
        engine.step((sid, 1, [2, 3]))
        engine.step((sid, 1, [2, 3, 4, 5]))
        engine.step((sid, 5, [6]))
        found.until(lambda: len(found.text_of(sid)) == 6, "six ids")
        assert found.text_of(sid) == [1, 2, 3, 4, 5, 6]
        assert found.router.live.totals.missing_outputs == 0
        assert found.router.live.totals.generated_tokens == 6


def test_logprobs_that_come_again_are_skipped() -> None:
    with world() as found:
        (engine,) = found.engines()
        sid, _ = found.placed()
        engine.accept(sid)

        def records(offset: int, count: int) -> list[SequenceLogprobs]:
            return [SequenceLogprobs(sid, offset, [TokenLogprobs(-float(offset + i), [], []) for i in range(count)])]

        engine.step((sid, 0, [1, 2]), logprobs=records(0, 2))
        engine.step((sid, 1, [2, 3]), logprobs=records(1, 2))
        engine.step((sid, 3, [4]), logprobs=records(3, 1))
        found.until(lambda: len(found.text_of(sid)) == 4, "four ids")
        got = [item for output in found.tokenizer.of(StepOutput) for item in output.logprobs]
        assert [(item.offset + i, one.logprob) for item in got for i, one in enumerate(item.tokens)] == [
            (i, -float(i)) for i in range(4)
        ]
        assert found.sequence(sid).logprobs == [], "what was handed over is not kept"


def test_ids_that_are_missing_are_asked_for_and_come() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        engine.step((sid, 5, [6]))
        (resync,) = engine.wait(Resync)
        assert resync == Resync([sid], [3])
        engine.step((sid, 6, [7]))  # sent before the question was there
        engine.step((sid, 3, [4, 5, 6, 7]))
        found.until(lambda: len(found.text_of(sid)) == 7, "all ids")
        assert found.text_of(sid) == [1, 2, 3, 4, 5, 6, 7]
        assert len(engine.of(Resync)) == 1
        assert found.router.live.totals.missing_outputs == 1
        found.skew = 2 * REPAIR_SECONDS
        found.settle()
        assert found.ends_of(sid) == []
        engine.step((sid, 7, [8]), finished=[Finished(sid, 0, "length", 8, Usage(10))])
        found.until(lambda: found.ends_of(sid), "its end")
        assert found.ends_of(sid)[0].reason == "length"
        idle(found)


def test_ids_that_stay_missing_end_the_sequence_with_an_error() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        other, _ = found.running()
        engine.step((sid, 5, [6]))
        engine.wait(Resync)
        found.skew = 2 * REPAIR_SECONDS
        found.until(lambda: found.ends_of(sid), "its end")
        assert [(item.reason, item.code) for item in found.ends_of(sid)] == [("error", "internal_error")]
        found.until(lambda: Abort([sid], "admin") in engine.of(Abort), "the engine is told to stop")
        engine.step((sid, 6, [7]))
        engine.finish(sid, 7, "abort")
        engine.step((other, 3, [4]))
        found.until(lambda: found.text_of(other) == [1, 2, 3, 4], "others go on")
        assert found.text_of(sid) == [1, 2, 3]
        assert len(found.ends_of(sid)) == 1


def test_a_last_word_that_counts_more_ids_than_came_is_an_error() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        engine.finish(sid, 4)
        found.until(lambda: found.ends_of(sid), "its end")
        assert [(item.reason, item.code) for item in found.ends_of(sid)] == [("error", "internal_error")]
        idle(found)


def test_outputs_of_other_attempts_and_unknown_sequences_are_dropped_and_counted() -> None:
    with world(ranks=2) as found:
        engines = found.engines()
        sid, engine = found.running()
        stranger = next(end for end in engines if end is not engine)
        engine.step((sid, 3, [99]), attempts=[1])
        engine.step((77 << 8, 0, [99]))
        engine.step(finished=[Finished(sid, 1, "stop", 4, Usage(10))])
        engine.accept(sid, attempt=1)
        stranger.step((sid, 3, [99]))
        engine.step((sid, 3, [4]), (78 << 8, 0, [99]))
        found.until(lambda: found.router.live.totals.stale_outputs == 6, "all are counted")
        found.until(lambda: len(found.text_of(sid)) == 4, "the right one goes on")
        assert found.text_of(sid) == [1, 2, 3, 4]
        assert not any(77 << 8 in output.sids or 78 << 8 in output.sids for output in found.tokenizer.of(StepOutput))


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        (StepOutput([256], [0], [0], [2]), ids_of(1)),
        (StepOutput([256], [0], [0], [10**9]), ids_of(1)),
        (StepOutput([256], [0], [0], [-1]), b""),
        (StepOutput([256, 512], [0, 0], [0, 0], [2, -1]), ids_of(1)),
        (StepOutput([256], [0, 0], [0], [1]), ids_of(1)),
        (StepOutput([256], [0], [0], [1]), b"123"),
    ],
)
def test_84_a_step_that_makes_no_sense_is_counted(message: StepOutput, frame: bytes) -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        engine.send(message, frame)
        engine.step((sid, 3, [4]))
        found.until(lambda: len(found.text_of(sid)) == 4, "the next one is taken")
        assert found.router.listener.counters.bad_messages == 1


def test_a_first_output_before_its_acceptance_accepts() -> None:
    with world() as found:
        (engine,) = found.engines()
        sid, _ = found.placed()
        engine.step((sid, 0, [1]))
        found.until(lambda: found.text_of(sid) == [1], "its id")
        kinds = [type(message) for message, _ in found.tokenizer.got if isinstance(message, (Accepted, StepOutput))]
        assert kinds == [Accepted, StepOutput]
        engine.accept(sid)
        found.settle()
        assert len(found.tokenizer.of(Accepted)) == 1


def test_an_engine_may_refuse_a_request() -> None:
    with world() as found:
        (engine,) = found.engines()
        sid, _ = found.placed()
        other, _ = found.placed()
        engine.send(Rejected(sid, 500, "server_error", "internal_error", None, "internal error"))
        found.until(lambda: found.rejections(sid), "it is passed on")
        assert found.rejections(sid)[0].code == "internal_error"
        assert list(found.router.live.journal.sequences) == [other]


def test_an_engine_may_end_a_sequence_before_it_is_accepted() -> None:
    with world() as found:
        (engine,) = found.engines()
        sid, _ = found.placed()
        engine.finish(sid, 0, "error", code="internal_error")
        found.until(lambda: found.ends_of(sid), "it is passed on")
        idle(found)


# --- a tokenizer that does not read -----------------------------------------------------------------------------------


def test_42_what_a_tokenizer_cannot_take_is_kept_and_merged() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        other, _ = found.placed()
        real = found.router.listener.send
        closed = True

        def send(peer: Any, message: Any, *frames: Any) -> bool:
            return not (closed and peer.role == "tokenizer") and real(peer, message, *frames)

        found.router.listener.send = send  # type: ignore[method-assign]
        engine.accept(other)
        for number in range(3, 40):
            engine.step((sid, number, [number]), (other, number - 3, [number]))
        engine.step((sid, 40, [2]), finished=[Finished(sid, 0, "stop", 41, Usage(10), stop_id=2)])
        found.until(lambda: sid not in found.router.live.journal.sequences, "the router has all of it")
        assert found.tokenizer.of(StepOutput)[1:] == []
        closed = False
        found.skew = 1.0
        found.until(lambda: found.ends_of(sid), "it comes")
        assert found.text_of(sid) == [1, 2, 3, *range(3, 40), 2]
        assert found.text_of(other) == list(range(3, 40))
        kinds = [type(message).__name__ for message, _ in found.tokenizer.got]
        assert kinds.index("Accepted", kinds.index("StepOutput")) < len(kinds) - 1, "the acceptance comes first"
        assert len(found.tokenizer.of(StepOutput)) == 2, "all of it in one message"


def test_42_a_step_after_one_that_did_not_fit_brings_both() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        real, refused = found.router.listener.send, 0

        def send(peer: Any, message: Any, *frames: Any) -> bool:
            nonlocal refused
            if isinstance(message, StepOutput) and not refused:
                refused += 1
                return False
            return real(peer, message, *frames)

        found.router.listener.send = send  # type: ignore[method-assign]
        engine.step((sid, 3, [4]))
        found.until(lambda: refused, "a step does not fit")
        found.skew = 1.0
        engine.step((sid, 4, [5]))
        found.until(lambda: len(found.text_of(sid)) == 5, "the next one brings both")
        assert found.text_of(sid) == [1, 2, 3, 4, 5]


def test_a_tokenizer_that_takes_nothing_for_too_long_is_lost() -> None:
    with world(engine_silence_seconds=5.0) as found:
        found.engines()
        sid, engine = found.running()
        real = found.router.listener.send
        found.router.listener.send = lambda peer, *rest: peer.role != "tokenizer" and real(peer, *rest)  # type: ignore[method-assign]
        engine.step((sid, 3, [4]))
        found.until(lambda: len(found.sequence(sid).produced) == 4, "the id is journalled")
        found.skew = 4.0
        engine.step((sid, 4, [5]))
        found.until(lambda: len(found.sequence(sid).produced) == 5, "the engine is heard")
        assert engine.aborts() == []
        found.skew = 6.0
        found.until(lambda: engine.aborts() == [sid], "its sequences are aborted")
        found.router.listener.send = real  # type: ignore[method-assign]
