"""A real frontend under uvicorn on port 0, between real HTTP clients and a fake tokenizer and router."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvloop
import zmq

from frontend.config import FrontendConfig
from frontend.main import Frontend
from tests.pipeline.web import Answer, Client, Stream, poll
from wire.child import Control
from wire.limits import Limits
from wire.link import Listener, Peer
from wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Generate,
    Message,
    ServiceStatus,
    Stats,
    TextDelta,
    TextOutput,
    Usage,
    Welcome,
)

SECRET = b"s" * 32
SECONDS = 5.0
M = TypeVar("M", bound=Message)


class Fake:
    """A listening process of the service: `inbox` has what the frontend sent, `say` answers it."""

    def __init__(self, context: Any, path: str, role: str, generation: int) -> None:
        self.role = role
        self.listener = Listener(
            context, path, role, generation, SECRET, lambda peer: Welcome(PROTOCOL_VERSION, role, generation, 0)
        )
        self.inbox: queue.Queue[tuple[Any, list[bytes]]] = queue.Queue()
        self.outbox: queue.Queue[tuple[Message, tuple[bytes, ...]]] = queue.Queue()
        self.peer: Peer | None = None
        self.mute = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        beat = 0.0
        while not self._end.is_set():
            self.listener.socket.poll(3)
            now = time.monotonic()
            for peer, message, frames in self.listener.drain(now):
                self.peer = peer
                self.inbox.put((message, frames))
                beat = 0.0 if self.role == "router" else beat
            if self.role == "router" and self.peer is not None and now - beat > 0.5 and not self.mute:
                beat = now
                self.listener.send(self.peer, ServiceStatus("ok", "", 1, 1))
            while self.peer is not None and not self.outbox.empty():
                message, parts = self.outbox.get()
                assert self.listener.send(self.peer, message, *parts)
        self.listener.close()

    def say(self, message: Message, *frames: bytes) -> None:
        self.outbox.put((message, frames))

    def next(self, kind: type[M], seconds: float = SECONDS) -> M:
        """The next message of this kind; others before it are dropped."""
        return self.next_with_frames(kind, seconds)[0]

    def next_with_frames(self, kind: type[M], seconds: float = SECONDS) -> tuple[M, list[bytes]]:
        deadline = time.monotonic() + seconds
        while True:
            message, frames = self.inbox.get(timeout=max(0.001, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message, frames

    def has(self, kind: type[Message]) -> bool:
        """Whether such a message waits in the inbox."""
        return any(isinstance(message, kind) for message, _ in list(self.inbox.queue))

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class World(Client):
    """Frontend, fake tokenizer, fake router; and an HTTP client of it."""

    def __init__(self, **config: Any) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="dw")
        listener = socket.create_server(("127.0.0.1", 0))
        super().__init__("127.0.0.1", listener.getsockname()[1])
        self.config = FrontendConfig(
            run_dir=self.folder.name,
            secret=SECRET,
            listen_fd=listener.fileno(),
            host="127.0.0.1",
            port=self.port,
            served_models=["m", "org/second"],
            created=1_700_000_000,
            frontends=1,
            **{"tokenizers": 1, "limits": Limits(), **config},
        )
        self.context: Any = zmq.Context()
        self.router = self.fake("router.sock", "router", 7)
        self.tokenizers = [self.fake(f"tokenizer.{i}.sock", "tokenizer", 11 + i) for i in range(self.config.tokenizers)]
        self.frontend: Frontend
        self.loop: asyncio.AbstractEventLoop
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener, started), daemon=True)
        self._thread.start()
        assert started.wait(SECONDS)
        poll("the links are up", lambda: self.get("/health").status == 200, SECONDS)

    def _run(self, listener: socket.socket, started: threading.Event) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.frontend = Frontend(self.config, 0, 3)
            serving = asyncio.create_task(self.frontend.serve(listener))
            while not self.frontend.server.started:
                await asyncio.sleep(0.005)
            started.set()
            await serving

        uvloop.run(main())

    def fake(self, path: str, role: str, generation: int) -> Fake:
        return Fake(self.context, f"{self.folder.name}/{path}", role, generation)

    @property
    def tokenizer(self) -> Fake:
        return self.tokenizers[0]

    def control(self, control: Control) -> None:
        self.loop.call_soon_threadsafe(self.frontend.control, control)

    def running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        if self.running():
            self.loop.call_soon_threadsafe(self.frontend.stop)
            self._thread.join(SECONDS)
            assert not self.running(), "the frontend did not end"
        for fake in [self.router, *self.tokenizers]:
            fake.close()
        self.context.destroy(0)
        self.folder.cleanup()

    def nothing_ran(self) -> bool:
        """Whether no request waits unread at a tokenizer."""
        return not any(fake.has(Generate) for fake in self.tokenizers)

    # --- requests under way ---------------------------------------------------------------------------------------

    def begin(self, path: str, body: Any, headers: dict[str, str] | None = None) -> http.client.HTTPConnection:
        """Send a request and do not wait for its answer."""
        connection = self.connect(SECONDS)
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, payload, {"Content-Type": "application/json", **(headers or {})})
        return connection

    def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> Call:
        """A chat request that has reached the fake tokenizer."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return Call(self, self.begin("/v1/chat/completions", body, headers))

    def completion(self, **fields: Any) -> Call:
        return Call(self, self.begin("/v1/completions", {"model": "m", "prompt": "hi", **fields}))


class Call:
    """One request, seen from both sides: the client's connection and the `Generate` at the tokenizer."""

    def __init__(self, world: World, connection: http.client.HTTPConnection | None = None) -> None:
        self.world, self.started = world, time.perf_counter()
        self.connection = connection or world.connect()  # not used by a caller with a socket of its own
        self.generate, self.frames = world.tokenizer.next_with_frames(Generate)
        self.rid = self.generate.rid
        self.keep: socket.socket | None = None  # a caller's own socket, kept open as long as this
        self.last: Stream  # what `stream` gave
        self.sent: dict[int, int] = {}
        self.tokens: dict[int, int] = {}

    def accept(self, n: int = 1, **fields: Any) -> Call:
        sids = [self.rid | choice for choice in range(n)]
        message = Accepted(sids, [0] * n, rank=2, reason="session", prompt_tokens=5, **fields)
        self.world.tokenizer.say(message)
        return self

    def delta(self, text: str, choice: int = 0, tokens: int = 1, **fields: Any) -> TextDelta:
        offset = self.sent.get(choice, 0)
        self.sent[choice] = offset + len(text)
        self.tokens[choice] = self.tokens.get(choice, 0) + tokens
        return TextDelta(self.rid | choice, offset, text, self.tokens[choice], **fields)

    def text(self, *texts: str, choice: int = 0, **fields: Any) -> Call:
        """One message to the frontend with a delta for each text."""
        self.world.tokenizer.say(TextOutput([self.delta(text, choice, **fields) for text in texts]))
        return self

    def finish(self, reason: str = "length", text: str = "", choice: int = 0, **usage: Any) -> Call:
        usage_record = Usage(5, **usage)
        self.world.tokenizer.say(
            TextOutput([self.delta(text, choice, 1 if text else 0, finish_reason=reason, usage=usage_record)])
        )
        return self

    def fail(self, code: str, choice: int = 0) -> Call:
        self.world.tokenizer.say(TextOutput([self.delta("", choice, 0, error=code)]))
        return self

    def is_open(self) -> bool:
        """Whether the frontend knows that it is accepted."""
        live = self.world.frontend.hub.live.get(self.rid)
        return live is not None and live.open

    def stream(self, choices: int = 1) -> Stream:
        """The streamed answer, once its status line is there."""
        response = self.connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        self.last = Stream(self.connection, response, self.started, choices, response.status, headers)
        return self.last

    def answer(self) -> Answer:
        response = self.connection.getresponse()
        body = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, body, time.perf_counter() - self.started)


@contextmanager
def world(**config: Any) -> Iterator[World]:
    found = World(**config)
    try:
        yield found
    finally:
        found.close()


def live_requests(found: World) -> float:
    """What the frontend last told the router about its live requests."""
    return float(found.router.next(Stats).gauges["frontend_live_requests"])
