"""Law: whoever is lost, requests end at once and legally, and new ones work as soon as it is back (79, 83)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.pipeline.web import poll
from tests.unit.frontend_world import SECRET, World, world
from wire.child import Control
from wire.limits import Limits
from wire.messages import Abort, Generate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def here() -> Iterator[World]:
    with world() as found:
        yield found


def restart_tokenizer(here: World, generation: int, tell: bool = True) -> None:
    here.tokenizer.close()
    if tell:
        here.control(Control("lost", role="tokenizer", index=0, generation=11))
        poll("it is known to be lost", lambda: not here.frontend.hub.tokenizers[0].up, 5)
    here.tokenizers[0] = here.fake("tokenizer.0.sock", "tokenizer", generation)


def test_a_lost_tokenizer_ends_its_requests_at_once_and_comes_back(here: World) -> None:
    call = here.chat(stream=True).accept()
    stream = call.stream()
    call.text("a")
    assert stream.first_token() < 2
    queued = here.chat()
    here.tokenizer.close()
    started = time.perf_counter()
    here.control(Control("lost", role="tokenizer", index=0, generation=11))
    assert (stream.read().error or {})["code"] == "engine_unavailable"
    answer = queued.answer()
    assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
    assert here.post("/v1/completions", {"model": "m", "prompt": "x"}).error["code"] == "engine_unavailable"
    assert here.get("/health").status == 503
    assert time.perf_counter() - started < 1
    here.tokenizers[0] = here.fake("tokenizer.0.sock", "tokenizer", 12)
    poll("it is back", lambda: here.get("/health").status == 200, 5)
    assert here.chat().accept().finish("stop", text="new").answer().text() == "new"


def test_a_tokenizer_that_restarted_unseen_ends_what_it_had(here: World) -> None:
    queued = here.chat()
    here.tokenizer.close()
    here.tokenizers[0] = here.fake("tokenizer.0.sock", "tokenizer", 12)
    connection = here.begin("/v1/completions", {"model": "m", "prompt": "x"})  # answered with: who are you
    assert queued.answer().status == 503
    assert connection.getresponse().status == 503
    poll("it is back", lambda: here.frontend.hub.tokenizers[0].up, 5)
    assert here.chat().accept().finish("stop", text="new").answer().text() == "new"


def test_news_of_the_death_of_a_former_generation_changes_nothing(here: World) -> None:
    restart_tokenizer(here, 12)
    poll("it is back", lambda: here.frontend.hub.tokenizers[0].up, 5)
    call = here.chat()
    here.control(Control("lost", role="tokenizer", index=0, generation=11))
    here.control(Control("lost", role="engine", index=0, generation=5))
    here.control(Control("lost", role="tokenizer", index=9, generation=5))
    assert call.accept().finish("stop", text="a").answer().text() == "a"


def test_a_lost_router_ends_everything_and_comes_back(here: World) -> None:
    call = here.chat(stream=True).accept()
    stream = call.stream()
    here.router.close()
    here.control(Control("lost", role="router", index=0, generation=7))
    assert (stream.read().error or {})["code"] == "engine_unavailable"
    assert here.tokenizer.next(Abort).sids == [call.rid]
    assert here.post("/v1/completions", {"model": "m", "prompt": "x"}).status == 503
    assert here.get("/metrics").status == 503
    assert here.get("/health").status == 503
    here.router = here.fake("router.sock", "router", 8)
    poll("it is back", lambda: here.get("/health").status == 200, 5)
    assert here.chat().accept().finish("stop", text="new").answer().text() == "new"


def test_requests_are_bound_by_session_and_move_when_their_tokenizer_is_lost() -> None:
    with world(tokenizers=2) as here:
        homes: dict[str, int] = {}
        for session in map(str, range(8)):
            for _ in range(2):
                connection = here.begin("/v1/completions", {"model": "m", "prompt": "x", "session_id": session})
                poll("one has it", lambda: not here.nothing_ran(), 5)
                home = next(i for i, fake in enumerate(here.tokenizers) if fake.has(Generate))
                here.tokenizers[home].next(Generate)
                assert homes.setdefault(session, home) == home
                connection.close()
                here.tokenizers[home].next(Abort)
        assert set(homes.values()) == {0, 1}
        here.tokenizers[1].close()
        here.control(Control("lost", role="tokenizer", index=1, generation=12))
        poll("it shows", lambda: here.get("/health").json() == {"status": "degraded"}, 5)
        moved = next(session for session, home in homes.items() if home == 1)
        assert here.completion(session_id=moved).accept().finish("stop", text="a").answer().status == 200


def test_a_drain_refuses_new_requests_lets_streams_end_and_then_ends(here: World) -> None:
    call = here.chat(stream=True).accept()
    stream = call.stream()
    here.control(Control("drain", seconds=20))
    poll("it drains", lambda: here.get("/health").status == 503, 5)
    assert here.get("/health").error["code"] == "shutting_down"
    assert here.get("/live").status == 200
    answer = here.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]})
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "shutting_down", "1")
    call.text("a").finish()
    assert stream.read().text() == "a"
    poll("it has ended", lambda: not here.running(), 5)


def test_at_the_end_of_a_drain_open_streams_get_their_error_and_requests_503(here: World) -> None:
    call = here.chat(stream=True).accept()
    stream = call.stream()
    queued = here.chat()
    here.control(Control("drain", seconds=0.3))
    assert (stream.read().error or {})["code"] == "shutting_down"
    assert queued.answer().error["code"] == "shutting_down"
    assert here.tokenizer.next(Abort).reason == "shutdown"
    poll("it has ended", lambda: not here.running(), 5)


def test_idle_connections_do_not_hold_up_a_drain(here: World) -> None:
    connection = here.connect()
    assert here.request("GET", "/live", connection=connection).status == 200
    here.control(Control("drain", seconds=20))
    poll("it has ended", lambda: not here.running(), 5)
    connection.close()


@pytest.fixture
def process(here: World, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A frontend as its launcher starts it: the process, its HTTP port, and the reading end of its status pipe."""
    listener = socket.create_server(("127.0.0.1", 0))
    status_read, status_write = os.pipe()
    config = msgspec.structs.replace(here.config, listen_fd=listener.fileno(), port=listener.getsockname()[1])
    envelope = {
        "role": "frontend",
        "index": 1,
        "generation": 99,
        "launcher_pid": os.getpid(),
        "status_fd": status_write,
        "log_level": "info",
        "config": msgspec.Raw(msgspec.json.encode(config)),
    }
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "frontend.main"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=log,
            pass_fds=[listener.fileno(), status_write],
        )
    os.close(status_write)
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(envelope) + b"\n")
    child.stdin.flush()
    yield child, config.port, status_read
    if child.poll() is None:
        child.send_signal(signal.SIGKILL)
        child.wait(5)
    child.stdin.close()
    os.close(status_read)
    listener.close()
    assert SECRET not in (tmp_path / "log").read_bytes()


def test_the_process_says_ready_serves_and_ends_with_0_after_a_drain(
    process: tuple[subprocess.Popen[bytes], int, int],
) -> None:
    child, port, status = process
    assert b'"ready"' in os.read(status, 4096)
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        client.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(Control("drain", seconds=5)) + b"\n")
        child.stdin.flush()
        assert child.wait(5) == 0


def test_the_process_ends_when_its_launcher_is_gone(process: tuple[subprocess.Popen[bytes], int, int]) -> None:
    child, _, status = process
    assert b'"ready"' in os.read(status, 4096)
    assert child.stdin is not None
    child.stdin.close()
    child.wait(4)


def test_the_config_travels_as_json(here: World) -> None:
    raw = msgspec.json.encode(here.config)
    assert msgspec.json.decode(raw, type=type(here.config)) == here.config
    assert here.config.limits == Limits()
