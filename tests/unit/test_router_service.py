"""The law of the service: everybody is told what it can do now; who does not fit in is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.router_world import End, engine_info, world
from wire.messages import (
    Hook,
    HookReply,
    Refused,
    ServiceStatus,
)


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
        found.until(lambda: frontend.of(ServiceStatus)[-1].ranks_ready == 2, "both")
        assert states(frontend)[-1] == "degraded", "a tokenizer is still out"
        found.dial("tokenizer", 1)
        found.until(lambda: states(frontend)[-1] == states(found.tokenizer)[-1] == "ok", "both, and both tokenizers")
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
