"""The router at its own socket, with engines and tokenizers played by the test.

36: placement rests on the router's own count, whatever engines report. 38: load is counted in tokens. 41: without
an engine the answer is 503 at once. 42: a send that cannot be made is known at once, and gaps are counted.
"""

from __future__ import annotations

import re
import secrets
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine_proc.config import EngineConfig
from frontend.config import FrontendConfig
from router_proc.config import RouterConfig
from tests.pipeline.harness import SLACK, TINY
from tests.pipeline.parts import FakePeer, Part, engine_info, pump_until, router, submit
from tests.pipeline.web import Client, poll
from tokenizer_proc.config import TokenizerConfig
from wire.limits import Limits
from wire.link import HIGH_WATER
from wire.messages import Abort, Accepted, Finished, Refused, Rejected, Stats, StepOutput, Submit, Usage


@pytest.mark.parametrize("reports", ["none", "old", "lies"])
@pytest.mark.parametrize("routing", ["affinity", "least-loaded"])
def test_36_placement_does_not_rest_on_reports(tmp_path: Path, reports: str, routing: str) -> None:
    ranks, each = 3, 50
    with router(tmp_path, ranks, routing=routing) as tested:

        def report(rank: int) -> None:
            running = {"none": None, "old": 0.0, "lies": 1000.0 * (rank == 0)}[reports]
            if running is not None:
                tested.engines[rank].send(Stats({}, {"requests_running": running, "requests_waiting": running}, {}))

        for start in range(0, ranks * each, 10):
            for rank in range(ranks):
                report(rank)
            tested.send(*[submit(start + number + 1, 30, 50) for number in range(10)])
        tested.until(lambda: sum(tested.received()) == ranks * each, "all requests are placed")
        assert all(abs(count - each) <= 1 for count in tested.received()), tested.received()


def test_38_one_long_prompt_weighs_more_than_two_short_ones(tmp_path: Path) -> None:
    with router(tmp_path, 2) as tested:
        home = tested.place(submit(1, 10_000, 10))
        assert [tested.place(submit(number, 1000, 10)) for number in (2, 3, 4)] == [1 - home] * 3


def test_38_home_is_left_only_above_the_slack_or_the_cost_of_moving(tmp_path: Path) -> None:
    slack, tokens, output = 3000, 256, 500
    keys = secrets.token_bytes(32 * (tokens // 128))
    with router(tmp_path, 2, affinity_slack_tokens=slack) as tested:
        home, placed = -1, []
        for number in range(1, 12):
            rank = tested.place(submit(number, tokens, output, keys))
            home = rank if home < 0 else home
            placed.append(rank == home)
        # uncached part + output of each: home stays while its load is at most `slack` above the other's (empty) one
        first_left = placed.index(False)
        assert slack // (tokens + output) <= first_left <= slack // output + 1, placed


def test_37_events_lower_the_load(tmp_path: Path) -> None:
    with router(tmp_path, 2) as tested:
        first = tested.place(submit(1, 4000, 100))
        engine = tested.engines[first]
        engine.send(Accepted([1 << 8], [0]))
        ended = Finished(1 << 8, 0, "stop", 1, Usage(4000), stop_id=2)
        engine.send(StepOutput([1 << 8], [0], [0], [1], [ended]), (2).to_bytes(4, "little"))
        tested.until(lambda: bool(tested.tokenizer.of(StepOutput)), "the end reaches the tokenizer")
        assert {tested.place(submit(number, 300, 100)) for number in (2, 3)} == {0, 1}


def test_37_aborts_are_idempotent_and_unknown_ids_are_no_error(tmp_path: Path) -> None:
    with router(tmp_path, 1) as tested:
        tested.tokenizer.send(Abort([77 << 8, 78 << 8], "client"))
        tested.place(submit(1, 100, 100))
        for _ in range(3):
            tested.tokenizer.send(Abort([1 << 8], "client"))
        engine = tested.engines[0]
        tested.until(lambda: bool(engine.of(Abort)), "the abort reaches the engine")
        ended = Finished(1 << 8, 0, "abort", 0, Usage(100))
        for _ in range(2):
            engine.send(StepOutput([], [], [], [], [ended]), b"")
        tested.place(submit(2, 100, 100))
        assert re.search(r"^deepinfer:engine_inflight\{[^}]*\} 1(\.0)?$", tested.metrics(), re.M)


def test_42_a_peer_that_is_gone_is_known_at_once(tmp_path: Path) -> None:
    with router(tmp_path, 1) as tested:
        tested.engines[0].close()
        tested.engines.clear()
        tested.send(submit(1, 100, 10))
        took = tested.until(lambda: bool(tested.tokenizer.of(Rejected)), "the request is refused", 1 * SLACK)
        (rejected, _), *_ = tested.tokenizer.of(Rejected)
        assert (rejected.rid, rejected.status, rejected.code) == (1 << 8, 503, "engine_unavailable")
        assert 1 <= rejected.retry_after <= 60
        assert took < 1 * SLACK


def test_42_a_full_queue_drops_nothing_silently(tmp_path: Path) -> None:
    """An engine that does not read: whatever its queues do not hold is refused, one by one."""
    count = 2 * HIGH_WATER + 2000
    with router(tmp_path, 1, max_queued_requests=10 * count) as tested:
        deaf = tested.engines.pop()
        for number in range(1, count + 1):
            message, *frames = submit(number, 8, 4)
            poll("the router takes it", partial(tested.tokenizer.dialer.send, message, *frames), 2 * SLACK)
            if number % 256 == 0:  # what is refused must find room on its way back
                tested.tokenizer.pump()
        tested.until(lambda: bool(tested.tokenizer.of(Rejected)), "some are refused", 2 * SLACK)

        def told() -> int:
            deaf.pump()
            return len(tested.tokenizer.of(Rejected)) + len(deaf.of(Submit))

        tested.until(lambda: told() >= count, "each request is either placed or refused", 4 * SLACK)
        assert told() == count
        assert {rejected.status for rejected, _ in tested.tokenizer.of(Rejected)} <= {429, 503}
        tested.engines.append(deaf)


def test_42_gaps_are_counted_and_logged(tmp_path: Path) -> None:
    with router(tmp_path, 1) as tested:
        engine = tested.engines[0]
        engine.dialer._sent += 3  # three messages that never come
        engine.send(Stats({}, {}, {}))

        def gaps() -> float:
            found = re.findall(r'^deepinfer:ipc_gaps_total\{[^}]*process="router[^}]*\} (\S+)$', tested.metrics(), re.M)
            return sum(float(value) for value in found)

        poll("the gap is counted", lambda: gaps() == 1, 2)
        assert "gap" in tested.part.log_path.read_text()


def test_41_without_an_engine_503_at_once_and_back_when_one_comes(tmp_path: Path) -> None:
    secret = secrets.token_bytes(32)
    limits = Limits()
    with tempfile.TemporaryDirectory(prefix="dis") as run_dir, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        port = listener.getsockname()[1]
        configs: list[tuple[str, str, Any]] = [
            ("router_proc.main", "router", RouterConfig(run_dir, secret, ranks=1, tokenizers=1, frontends=1)),
            (
                "tokenizer_proc.main",
                "tokenizer",
                TokenizerConfig(run_dir, secret, secrets.token_bytes(32), str(TINY), ["tiny"], limits),
            ),
            (
                "frontend.main",
                "frontend",
                FrontendConfig(
                    run_dir,
                    secret,
                    listener.fileno(),
                    "127.0.0.1",
                    port,
                    ["tiny"],
                    1,
                    limits=limits,
                    tokenizers=1,
                    frontends=1,
                ),
            ),
        ]
        parts = [Part(module, role, 0, config, tmp_path / f"{role}.log") for module, role, config in configs]
        try:
            for part in parts:
                part.wait_ready()
            client = Client("127.0.0.1", port)
            body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
            for stream in (False, True):
                answer = client.post("/v1/chat/completions", body | {"stream": stream})
                assert answer.status == 503
                assert answer.error["code"] == "engine_unavailable"
                assert answer.seconds < 0.2 * SLACK
            assert client.get("/health").status == 503
            assert client.get("/live").status == 200
            engine = EngineConfig(run_dir, secret, 0, 1, "mock", str(TINY), "cpu", "auto")
            parts.append(Part("engine_proc.mock_main", "engine", 0, engine, tmp_path / "engine.log"))
            parts[-1].wait_ready()
            poll("it is served", lambda: client.post("/v1/chat/completions", body).status == 200, 1 * SLACK)
            assert client.get("/health").json()["status"] == "ok"
        finally:
            for part in parts:
                part.stop()


def test_41_ranks_that_disagree_are_refused_by_name(tmp_path: Path) -> None:
    with router(tmp_path, 2) as tested:
        old = tested.engines.pop()
        old.close()
        other = FakePeer(tested.path, tested.secret, "engine", 1, engine_info(model_digest="1" * 64))
        pump_until([other], lambda: bool(other.of(Refused)), 5, "the other model is refused")
        assert "model" in other.of(Refused)[0][0].reason
        other.close()
