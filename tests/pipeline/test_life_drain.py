"""83: a drain lets streams go on and refuses new requests; it ends with the last stream or, in-band, with its time."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.pipeline.harness import SLACK, Service
from tests.pipeline.web import poll

CHAT = "/v1/chat/completions"


def draining(folder: Path, *flags: str) -> Service:
    return Service(folder, *flags).wait_ready()


def test_83_streams_end_normally_and_new_requests_are_refused(folder: Path) -> None:
    server = draining(folder, "--drain-seconds", "60")
    try:
        stream = server.stream(CHAT, server.chat_body(hooks={"step_ms": 20}, max_tokens=150))
        stream.first_token()
        server.process.send_signal(signal.SIGTERM)
        poll("health says it", lambda: server.get("/health").status == 503, SLACK)
        assert server.get("/live").status == 200
        refused = server.post(CHAT, server.chat_body(max_tokens=1))
        assert refused.status == 503
        assert refused.error["code"] == "shutting_down"
        stream.read()
        assert stream.error is None
        assert stream.finish_reason() == "length"
        gaps = [later - earlier for earlier, later in zip(stream.times, stream.times[1:], strict=False)]
        assert max(gaps) < 0.5 * SLACK, "the stream keeps its pace"
        ended = time.monotonic()
        assert server.process.wait(15) == 0
        assert time.monotonic() - ended < 3 * SLACK, "as soon as the last one ended"
    finally:
        server.stop()


def test_83_streams_open_at_the_end_of_the_time_end_in_band(folder: Path) -> None:
    server = draining(folder, "--drain-seconds", "1")
    try:
        streams = [
            server.stream(CHAT, server.chat_body(hooks={"step_ms": 20}, max_tokens=4000, n=choices))
            for choices in (1, 2)
        ]
        for stream in streams:
            stream.first_token()
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.read()
            assert stream.error is not None
            assert stream.error["code"] == "shutting_down"
        assert 0.9 <= time.monotonic() - started < 1 + 1 * SLACK
        assert server.process.wait(15) == 0
    finally:
        server.stop()


def test_83_a_second_signal_ends_all_within_3_s(folder: Path) -> None:
    server = draining(folder, "--drain-seconds", "600")
    try:
        stream = server.stream(CHAT, server.chat_body(hooks={"step_ms": 20}, max_tokens=4000))
        stream.first_token()
        server.process.send_signal(signal.SIGTERM)
        poll("health says it", lambda: server.get("/health").status == 503, SLACK)
        children = server.children()
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - started < 3
        assert not [child for child in children if child.is_running()]
        stream.close()
    finally:
        server.stop()


def test_83_an_idle_service_drains_at_once(folder: Path) -> None:
    server = draining(folder, "--frontends", "2")
    started = time.monotonic()
    run_dir = server.run_dir()
    assert server.stop() == 0
    assert time.monotonic() - started < 3 * SLACK
    assert not run_dir.exists()


def test_83_a_request_that_waits_is_served_in_the_drain(folder: Path) -> None:
    """Accepted is accepted: a stream behind another one in the engine's queue ends normally too."""
    server = draining(folder, "--drain-seconds", "60", "--max-running", "1")
    try:
        bodies = [server.chat_body(f"hello {number}", hooks={"step_ms": 10}, max_tokens=60) for number in range(3)]
        streams = [server.stream(CHAT, body) for body in bodies]
        server.process.send_signal(signal.SIGTERM)
        assert [stream.read().finish_reason() for stream in streams] == ["length"] * 3
        assert server.process.wait(15) == 0
    finally:
        server.stop()
