"""The law of the way in (behaviours 37, 39, 41, 43): a request is dispatched at once or refused with the reason; an
abort or a deadline ends it once, in whatever state it is, and nothing is left of it.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.unit.router_world import engine_info, idle, ids_of, params, world
from wire.messages import (
    Abort,
    Accepted,
    Finished,
    Rejected,
    Resync,
    Stats,
    Submit,
    Usage,
)


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


# --- aborts and deadlines ---------------------------------------------------------------------------------------------


def test_43_an_abort_goes_to_the_engine_once_and_its_end_comes_back() -> None:
    with world() as found:
        found.engines()
        sid, engine = found.running()
        for _ in range(3):
            found.tokenizer.send(Abort([sid], "stop"))
        found.until(engine.aborts, "the abort reaches the engine")
        engine.step((sid, 3, [4]))
        engine.finish(sid, 4, "abort", prompt=33)
        found.until(lambda: found.ends_of(sid), "the engine's last word")
        assert engine.aborts() == [sid]
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
        found.until(lambda: sum(len(set(end.aborts())) for end in engines) == 120, "all aborts are there")
        for engine in engines:
            for sid in engine.aborts():
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
        assert engine.aborts() == []
        closed = False
        found.until(lambda: engine.aborts() == [sid], "it is sent")


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
        found.until(lambda: engine.aborts() == [sid], "the engine is told")
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
        found.until(lambda: engine.aborts() == [sid], "the engine is told")
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


@pytest.mark.parametrize("reports", ["none", "old", "lies"])
def test_35_36_a_burst_spreads_evenly_whatever_engines_report(reports: str) -> None:
    with world(ranks=3, max_queued_requests=1000) as found:
        engines = found.engines()
        for number in range(150):
            if reports != "none" and number % 10 == 0:
                running = {"old": [0, 0, 0], "lies": [1000, 0, 5]}[reports]
                for engine, value in zip(engines, running, strict=True):
                    engine.send(Stats({}, {"requests_running": value, "requests_waiting": value}, {}))
            found.request(tokens=300, max_tokens=50, first_hash=number.to_bytes(16, "little"))
        found.until(lambda: sum(len(end.of(Submit)) for end in engines) == 150, "all are placed")
        assert [len(end.of(Submit)) for end in engines] == [50, 50, 50]
