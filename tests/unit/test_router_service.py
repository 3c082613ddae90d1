"""The laws of the way in and the way out: a request is dispatched at once or refused with the reason; every id reaches
its tokenizer once and in order whatever comes twice, late or not at all; a sequence ends once and holds nothing then.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from router_proc.outputs import REPAIR_SECONDS
from tests.unit.router_world import End, engine_info, idle, ids_of, params, world
from wire.messages import (
    Abort,
    Accepted,
    Finished,
    Hook,
    HookReply,
    Refused,
    Rejected,
    Resync,
    SequenceLogprobs,
    ServiceStatus,
    StepOutput,
    Submit,
    TokenLogprobs,
    Usage,
)

# --- in ---------------------------------------------------------------------------------------------------------------


def test_a_request_goes_to_an_engine_one_message_per_sequence() -> None:
    with world() as found:
        (engine,) = found.engines()
        sid = found.request(300, 50, b"k" * 64, n=3, tenant="t", session_key="s", user="u", first_hash=b"f" * 16)
        submits = engine.wait(Submit, 3)
        assert [(item.sid, item.attempt, item.n) for item in submits] == [(sid + i, 0, 1) for i in range(3)]
        for submit, frames in zip(submits, engine.frames_of(Submit), strict=True):
            assert (submit.tenant, submit.params) == ("t", params(50))
            assert [len(frame) for frame in frames] == [1200, 64, 0]
        engine.accept(sid, sid + 1)
        engine.accept(sid + 2)
        found.until(lambda: sum(len(item.sids) for item in found.tokenizer.of(Accepted)) == 3, "all are accepted")
        accepted = found.tokenizer.of(Accepted)
        assert [sid for item in accepted for sid in item.sids] == [sid, sid + 1, sid + 2]
        assert {(item.rank, item.reason) for item in accepted} == {(0, "least-loaded")}
        engine.step(*[(sid + i, 0, [10 + i]) for i in range(3)])
        for i in range(3):
            engine.finish(sid + i, 1)
        found.until(lambda: all(found.ends_of(sid + i) for i in range(3)), "all end")
        assert [found.text_of(sid + i) for i in range(3)] == [[10], [11], [12]]
        idle(found)


def test_41_without_an_engine_a_request_is_refused_at_once() -> None:
    with world() as found:
        started = time.monotonic()
        sid = found.request()
        found.until(lambda: found.rejections(sid), "a refusal")
        assert time.monotonic() - started < 1
        (rejected,) = found.rejections(sid)
        assert (rejected.status, rejected.type, rejected.code) == (503, "server_error", "engine_unavailable")
        assert 1 <= rejected.retry_after <= 60
        assert rejected.text
        engine = found.dial("engine", 0)
        sid = found.request()  # its model is still loading
        found.until(lambda: found.rejections(sid), "a refusal")
        engine.dialer.greet(engine_info())
        found.until(lambda: found.router.live.ranks[0].ready, "the engine is ready")
        assert found.placed()[1] is engine


def test_39_five_of_ten_are_dispatched_and_five_get_429() -> None:
    with world(max_queued_requests=4) as found:
        (engine,) = found.engines(max_running=1)
        sids = [found.request() for _ in range(10)]
        found.tokenizer.wait(Rejected, 5)
        found.settle()
        assert [item.sid for item in engine.of(Submit)] == sids[:5]
        for rejected in found.tokenizer.of(Rejected):
            assert (rejected.status, rejected.type, rejected.code) == (429, "rate_limit_error", "queue_full")
            assert 1 <= rejected.retry_after <= 60
        engine.accept(*sids[:5])
        engine.step((sids[0], 0, [2]), finished=[Finished(sids[0], 0, "stop", 1, Usage(10), stop_id=2)])
        found.until(lambda: found.ends_of(sids[0]), "one ends")
        assert found.placed()[1] is engine, "its place is free again"


def test_39_choices_that_do_not_fit_together_are_refused_whole() -> None:
    with world(max_queued_requests=1) as found:
        (engine,) = found.engines(max_running=2)
        sid = found.request(n=4)
        found.until(lambda: found.rejections(sid), "a refusal")
        assert found.rejections(sid)[0].status == 429
        found.settle()
        assert engine.of(Submit) == []
        idle(found)


def test_39_tokens_in_the_queue_are_limited() -> None:
    with world(max_queued_tokens=600) as found:
        found.engines()
        _, engine = found.running(tokens=500)
        assert found.placed(tokens=500)[1] is engine
        sid = found.request(tokens=500)
        found.until(lambda: found.rejections(sid), "a refusal")
        assert found.rejections(sid)[0].code == "queue_full"


@pytest.mark.parametrize("frames", [[], [b"1234"], [b"123", b""], [b"1234", b"k" * 32]])
def test_84_a_submit_that_makes_no_sense_is_counted_and_answered(frames: list[bytes]) -> None:
    with world() as found:
        (engine,) = found.engines()
        sid = found.ids.new()
        found.tokenizer.send(Submit(sid, 0, 1, "", params()), *frames)
        found.until(lambda: found.rejections(sid), "a refusal")
        assert found.rejections(sid)[0].code == "internal_error"
        assert found.router.listener.counters.bad_messages == 1
        assert engine.of(Submit) == []
        idle(found)


def test_a_second_submit_with_a_live_id_changes_nothing() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        for frames in ([ids_of(1), b""], [b"1"]):
            found.tokenizer.send(Submit(sid, 0, 1, "", params()), *frames)
        found.until(lambda: found.router.listener.counters.bad_messages == 2, "both are counted")
        assert len(engine.of(Submit)) == 1
        assert found.rejections(sid) == []
        engine.step((sid, 3, [4]))
        found.until(lambda: found.text_of(sid) == [1, 2, 3, 4], "it goes on")


def test_messages_that_a_role_does_not_send_are_counted() -> None:
    with world() as found:
        (engine,) = found.engines()
        frontend = found.dial("frontend", 0)
        wrong = [(engine, Abort([1], "client")), (frontend, Abort([1], "client")), (found.tokenizer, Resync([], []))]
        wrong += [(found.tokenizer, Abort([1], 'a"} 1\nb{c="')), (engine, Accepted([1], []))]
        for end, message in wrong:
            end.send(message)
        found.until(lambda: found.router.listener.counters.bad_messages == len(wrong), "all are counted")


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
        assert aborts(engine) == []
        found.skew = 6.0
        found.until(lambda: aborts(engine) == [sid], "its sequences are aborted")
        found.router.listener.send = real  # type: ignore[method-assign]


# --- aborts and deadlines ---------------------------------------------------------------------------------------------


def aborts(engine: End) -> list[int]:
    return [sid for message in engine.of(Abort) for sid in message.sids]


def test_43_an_abort_goes_to_the_engine_once_and_its_end_comes_back() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        for _ in range(3):
            found.tokenizer.send(Abort([sid], "stop"))
        found.until(lambda: aborts(engine), "the abort reaches the engine")
        engine.step((sid, 3, [4]))
        engine.finish(sid, 4, "abort", prompt=33)
        found.until(lambda: found.ends_of(sid), "the engine's last word")
        assert aborts(engine) == [sid]
        (end,) = found.ends_of(sid)
        assert (end.reason, end.usage.prompt_tokens) == ("abort", 33), "the tokenizer gets the usage"
        assert found.text_of(sid) == [1, 2, 3], "nothing after the abort is passed on"
        assert found.router.live.totals.aborted.total() == 0, "a stop string is no abort to count"
        idle(found)


def test_37_an_abort_in_any_state_leaves_nothing() -> None:
    source = random.Random(5)
    with world(ranks=3) as found:
        engines = found.engines()
        sids = [found.request(max_tokens=50) for _ in range(120)]
        found.until(lambda: sum(len(end.of(Submit)) for end in engines) == 120, "all are placed")
        for engine in engines:
            mine = [item.sid for item in engine.of(Submit)]
            accepted = [sid for sid in mine if source.random() < 0.7]
            engine.accept(*accepted)
            engine.step(*[(sid, 0, [5]) for sid in accepted if source.random() < 0.7])
        for sid in sids:
            found.tokenizer.send(Abort([sid, 99 << 8], "client"))
        found.until(lambda: sum(len(set(aborts(end))) for end in engines) == 120, "all aborts are there")
        for engine in engines:
            for sid in aborts(engine):
                engine.finish(sid, 1, "abort")
                engine.finish(sid, 1, "abort")
        idle(found)
        assert found.router.live.totals.aborted["client"] == 120
        counts = [0, 0, 0]
        for _ in range(30):
            counts[engines.index(found.placed(max_tokens=50)[1])] += 1
        assert counts == [10, 10, 10]


def test_aborting_unknown_ids_is_no_error() -> None:
    with world() as found:
        found.engines()
        found.tokenizer.send(Abort([1 << 8, 2 << 8, -1, 2**63], "client"))
        assert found.placed()
        assert found.router.listener.counters.bad_messages == 0


def test_an_abort_that_does_not_fit_into_the_queue_is_sent_later() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        real = found.router.listener.send
        closed = True

        def send(peer: Any, message: Any, *frames: Any) -> bool:
            return not (closed and isinstance(message, Abort)) and real(peer, message, *frames)

        found.router.listener.send = send  # type: ignore[method-assign]
        found.tokenizer.send(Abort([sid], "client"))
        found.until(lambda: found.sequence(sid).aborting, "the router knows")
        assert aborts(engine) == []
        closed = False
        found.until(lambda: aborts(engine) == [sid], "it is sent")


def test_a_deadline_before_acceptance_is_504() -> None:
    with world() as found:
        (engine,) = found.engines()
        sid, _ = found.placed(timeout=5.0)
        found.skew = 4.0
        found.settle()
        assert found.rejections(sid) == []
        found.skew = 5.5
        found.until(lambda: found.rejections(sid), "a refusal")
        (rejected,) = found.rejections(sid)
        assert (rejected.status, rejected.type, rejected.code) == (504, "server_error", "request_timeout")
        found.until(lambda: aborts(engine) == [sid], "the engine is told")
        engine.finish(sid, 0, "abort")
        idle(found)
        assert found.ends_of(sid) == []
        assert found.router.live.totals.aborted == {"deadline": 1}


def test_a_deadline_afterwards_ends_it_in_band() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running(timeout=5.0)
        found.skew = 5.5
        found.until(lambda: found.ends_of(sid), "its end")
        (end,) = found.ends_of(sid)
        assert (end.reason, end.code, end.completion_tokens) == ("error", "request_timeout", 3)
        found.until(lambda: aborts(engine) == [sid], "the engine is told")
        engine.finish(sid, 3, "abort")
        idle(found)
        assert len(found.ends_of(sid)) == 1


def test_a_deadline_of_a_request_that_has_ended_does_nothing() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running(timeout=5.0)
        engine.finish(sid, 3)
        found.until(lambda: found.ends_of(sid), "its end")
        found.skew = 6.0
        found.settle()
        assert len(found.ends_of(sid)) == 1
        assert found.rejections(sid) == []
        assert found.router.dispatcher.next_deadline() == float("inf")


def test_deadlines_of_ended_requests_are_not_kept() -> None:
    with world() as found:
        (engine,) = found.engines(max_running=4000)
        for _ in range(4):
            sids = [found.request(timeout=3600.0) for _ in range(1000)]
            found.until(lambda: len(engine.of(Submit)) == 1000, "all are placed")
            engine.accept(*sids)
            engine.step(*[(sid, 0, [2]) for sid in sids], finished=[Finished(s, 0, "stop", 1, Usage(10)) for s in sids])
            idle(found)
            engine.got.clear()
        assert len(found.router.dispatcher._deadlines) <= 1024 + 2 * 1000


# --- what everybody is told -------------------------------------------------------------------------------------------


def test_status_follows_the_ranks() -> None:
    with world(ranks=2) as found:
        frontend = found.dial("frontend", 0)
        frontend.wait(ServiceStatus)

        def states(end: End) -> list[str]:
            return [item.state for item in end.of(ServiceStatus)]

        assert states(frontend)[-1] == "loading"
        one = found.dial("engine", 0, engine_info(context_length=5000))
        found.until(lambda: states(frontend)[-1] == "degraded", "one of two")
        found.dial("engine", 1, engine_info(context_length=4000))
        found.until(lambda: states(frontend)[-1] == states(found.tokenizer)[-1] == "ok", "both")
        status = found.tokenizer.of(ServiceStatus)[-1]
        assert (status.ranks_ready, status.ranks) == (2, 2)
        assert status.service is not None
        assert status.service.context_length == 4000
        assert (status.service.model_digest, status.service.eos_ids) == ("d" * 64, [2])
        count = len(frontend.of(ServiceStatus))
        found.skew = 1.1
        found.until(lambda: len(frontend.of(ServiceStatus)) > count, "it is repeated")
        one.close()
        found.router._lose(found.router.listener.by_name["engine.0"], "test")
        found.router._lose(found.router.listener.by_name["engine.1"], "test")
        found.until(lambda: states(frontend)[-1] == "down", "none")
        assert 1 <= frontend.of(ServiceStatus)[-1].retry_after <= 60
        late = found.dial("frontend", 1)
        assert late.wait(ServiceStatus)[0].state == "down", "a newcomer is told at once"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_digest", "e" * 64),
        ("cache_format", "bf16"),
        ("vocab_size", 9),
        ("block_tokens", 16),
        ("keep_tokens", 140),
        ("eos_ids", [3]),
    ],
)
def test_41_an_engine_that_disagrees_is_refused_by_the_field(field: str, value: Any) -> None:
    with world(ranks=2) as found:
        found.dial("engine", 0, engine_info())
        other = found.dial("engine", 1)
        other.dialer.greet(engine_info(**{field: value}))
        other.wait(Refused)
        reason = other.of(Refused)[0].reason
        assert field in reason
        assert str(value) in reason
        assert str(getattr(engine_info(), field)) in reason
        assert not found.router.live.ranks[1].ready
        found.dial("engine", 1, engine_info())
        found.until(lambda: found.router.live.ranks[1].ready, "the right one is taken")


def test_an_engine_alone_may_differ_from_those_that_are_gone() -> None:
    with world() as found:
        found.dial("engine", 0, engine_info())
        found.router._lose(found.router.listener.by_name["engine.0"], "test")
        found.dial("engine", 0, engine_info(model_digest="e" * 64))
        found.until(lambda: found.router.live.ranks[0].ready, "it is taken")
        info = found.router.service.info
        assert info is not None
        assert info.model_digest == "e" * 64


@pytest.mark.parametrize(
    ("role", "index"), [("engine", 1), ("tokenizer", 2), ("frontend", -1), ("router", 0), ("x", 0)]
)
def test_who_has_no_place_here_is_refused_by_name(role: str, index: int) -> None:
    with world() as found:
        stranger = found.dial(role, index)
        stranger.wait(Refused)
        assert f"{role}.{index}" in stranger.of(Refused)[0].reason


def test_hooks_reach_the_engine_and_come_back() -> None:
    with world(ranks=2, test_hooks=True) as found:
        engines = found.engines()
        frontends = [found.dial("frontend", number) for number in range(2)]
        for number, frontend in enumerate(frontends):
            frontend.send(Hook(5, number, "check_pools", {"deep": number}))
        for number, engine in enumerate(engines):
            (hook,) = engine.wait(Hook)
            assert (hook.name, hook.args) == ("check_pools", {"deep": number})
            engine.send(HookReply(hook.query, True, {"free": number}))
        for number, frontend in enumerate(frontends):
            assert frontend.wait(HookReply) == [HookReply(5, True, {"free": number})]
        frontends[0].send(Hook(6, 7, "check_pools", {}))
        assert not frontends[0].wait(HookReply, 2)[1].ok
        frontends[0].send(Hook(7, 1, "hang", {}))
        engines[1].wait(Hook, 2)
        found.router._lose(found.router.listener.by_name["engine.1"], "test")
        assert not frontends[0].wait(HookReply, 3)[2].ok, "an engine that dies leaves no question open"
        found.router.check()


def test_hooks_are_off_by_default() -> None:
    with world() as found:
        (engine,) = found.engines()
        frontend = found.dial("frontend", 0)
        frontend.send(Hook(5, 0, "check_pools", {}))
        (reply,) = frontend.wait(HookReply)
        assert not reply.ok
        assert engine.of(Hook) == []
