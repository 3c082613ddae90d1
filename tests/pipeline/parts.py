"""Single processes of the service started by a test through the child frame, and fake peers on their sockets.

A test that starts a part knows its session secret, so it can play an engine, a tokenizer or a frontend.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from router_proc.config import RouterConfig
from tests.pipeline.harness import ROOT
from wire.child import Control, Envelope, new_generation
from wire.link import Dialer
from wire.messages import (
    PROTOCOL_VERSION,
    EngineInfo,
    Hello,
    Message,
    MetricsQuery,
    MetricsReply,
    Params,
    Submit,
)

M = TypeVar("M", bound=Message)


class Part:
    """One child process with an envelope from this test; its stderr goes to `log_path`."""

    def __init__(self, module: str, role: str, index: int, config: msgspec.Struct, log_path: Path) -> None:
        self.log_path, self.generation = log_path, new_generation()
        self._status, status_write = os.pipe()
        listen_fd = getattr(config, "listen_fd", None)
        kept = (status_write,) if listen_fd is None else (status_write, listen_fd)
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module], cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=kept
            )
        os.close(status_write)
        raw = msgspec.Raw(msgspec.json.encode(config))
        self._write(Envelope(role, index, self.generation, os.getpid(), status_write, "info", raw))

    def _write(self, line: msgspec.Struct) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(line) + b"\n")
        self.process.stdin.flush()

    def control(self, control: Control) -> None:
        self._write(control)

    def wait_ready(self, seconds: float = 30.0) -> None:
        """Until the process tells that it is ready; fails with its log when it ends before."""
        deadline, seen = time.monotonic() + seconds, b""
        while time.monotonic() < deadline:
            if select.select([self._status], [], [], 0.1)[0]:
                part = os.read(self._status, 65536)
                assert part, f"the process ended: {self.log_path.read_text()[-2000:]}"
                seen += part
                if any(json.loads(line)["what"] == "ready" for line in seen.splitlines()):
                    return
        raise AssertionError(f"not ready: {seen!r} {self.log_path.read_text()[-2000:]}")

    def stop(self) -> None:
        """Close its stdin, as the launcher's end does, and see it end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        os.close(self._status)


class FakePeer:
    """A test's own end of a link: collects what arrives by type."""

    def __init__(self, path: Path, secret: bytes, role: str, index: int, engine: EngineInfo | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.generation = new_generation()
        hello = Hello(PROTOCOL_VERSION, role, index, self.generation, secret, os.getpid(), engine)
        self.dialer = Dialer(self.context, str(path), hello)
        self.inbox: list[tuple[Message, list[bytes]]] = []

    def pump(self) -> None:
        self.inbox.extend(self.dialer.drain(time.monotonic()))

    def wait_welcome(self, seconds: float = 10.0) -> FakePeer:
        pump_until([self], lambda: self.dialer.ready, seconds, "the hello is answered")
        return self

    def send(self, message: Message, *frames: bytes) -> None:
        assert self.dialer.send(message, *frames), "the link does not take the message"

    def of(self, kind: type[M]) -> list[tuple[M, list[bytes]]]:
        """All messages of one type that have arrived, with their frames."""
        return [(message, frames) for message, frames in self.inbox if isinstance(message, kind)]

    def close(self) -> None:
        self.dialer.close()
        self.context.term()


def pump_until(peers: list[FakePeer], done: Callable[[], bool], seconds: float, what: str) -> float:
    """Read all peers' links until `done`; gives the seconds that took."""
    started = time.monotonic()
    poller = zmq.Poller()
    for peer in peers:
        poller.register(peer.dialer.socket, zmq.POLLIN)
    while not done():
        assert time.monotonic() - started < seconds, f"not within {seconds:g} s: {what}"
        poller.poll(20)
        for peer in peers:
            peer.pump()
    return time.monotonic() - started


def engine_info(**changes: Any) -> EngineInfo:
    """What a fake engine tells about itself."""
    values: dict[str, Any] = {
        "model_digest": "0" * 64,
        "cache_format": "fp32/128",
        "vocab_size": 512,
        "context_length": 100_000,
        "model_context_length": 100_000,
        "pool_tokens": 200_000,
        "block_tokens": 128,
        "keep_tokens": 1,
        "eos_ids": [2],
        "max_running": 64,
        "dtype": "fp32",
        "device": "cpu",
    }
    return EngineInfo(**{**values, **changes})


def params(max_tokens: int) -> Params:
    """Greedy, nothing else."""
    return Params(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=1,
        max_tokens=max_tokens,
    )


def submit(number: int, tokens: int, max_tokens: int, keys: bytes = b"", **fields: Any) -> tuple[Submit, bytes, bytes]:
    """A request of one sequence as a tokenizer sends it: message, prompt ids, block keys (random ones when b"")."""
    ids = number.to_bytes(4, "little") * tokens
    keys = keys or secrets.token_bytes(32 * (tokens // 128))
    return Submit(number << 8, 0, 1, "", params(max_tokens), **fields), ids, keys


class Router:
    """A router process with fake engines and a fake tokenizer around it."""

    def __init__(self, folder: Path, run_dir: Path, ranks: int, **config: Any) -> None:
        self.secret = secrets.token_bytes(32)
        self.path = run_dir / "router.sock"
        settings = RouterConfig(str(run_dir), self.secret, ranks=ranks, tokenizers=1, frontends=1, **config)
        self.part = Part("router_proc.main", "router", 0, settings, folder / "router.log")
        self.part.wait_ready()
        self.engines = [self.peer("engine", rank, engine_info()) for rank in range(ranks)]
        self.tokenizer, self.frontend = self.peer("tokenizer", 0), self.peer("frontend", 0)
        self._queries = 0

    def peer(self, role: str, index: int, engine: EngineInfo | None = None) -> FakePeer:
        return FakePeer(self.path, self.secret, role, index, engine).wait_welcome()

    @property
    def peers(self) -> list[FakePeer]:
        return [*self.engines, self.tokenizer, self.frontend]

    def send(self, *requests: tuple[Submit, bytes, bytes]) -> None:
        for message, *frames in requests:
            self.tokenizer.send(message, *frames)

    def until(self, done: Callable[[], bool], what: str, seconds: float = 10.0) -> float:
        return pump_until(self.peers, done, seconds, what)

    def received(self) -> list[int]:
        """Number of requests that each engine has got."""
        return [len(engine.of(Submit)) for engine in self.engines]

    def place(self, request: tuple[Submit, bytes, bytes]) -> int:
        """Send one request and give the rank that gets it."""
        before = self.received()
        self.send(request)
        self.until(lambda: sum(self.received()) == sum(before) + 1, "the request reaches an engine")
        return next(rank for rank, count in enumerate(self.received()) if count > before[rank])

    def metrics(self) -> str:
        """The Prometheus page, as a frontend gets it."""
        self._queries += 1
        self.frontend.send(MetricsQuery(self._queries, "prometheus"))

        def pages() -> list[bytes]:
            return [frames[0] for reply, frames in self.frontend.of(MetricsReply) if reply.query == self._queries]

        self.until(lambda: bool(pages()), "the metrics page")
        return pages()[0].decode()

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.part.stop()


@contextmanager
def router(folder: Path, ranks: int, **config: Any) -> Iterator[Router]:
    """A router with `ranks` ready fake engines; its sockets lie in a short private folder."""
    with tempfile.TemporaryDirectory(prefix="dis") as run_dir:
        found = Router(folder, Path(run_dir), ranks, **config)
        try:
            yield found
        finally:
            found.close()
