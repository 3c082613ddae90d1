"""A tokenizer process's inside in this process, between real links: the test plays frontend and router."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq

from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.main import Tokenizer
from wire.limits import Limits
from wire.link import Dialer, Listener, Peer
from wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Finished,
    Generate,
    Hello,
    Message,
    RequestIds,
    Sampling,
    SequenceLogprobs,
    ServiceInfo,
    ServiceStatus,
    Shape,
    StepOutput,
    Submit,
    TextDelta,
    TextOutput,
    Usage,
    Welcome,
)

TINY = Path(__file__).resolve().parents[1] / "fixtures" / "tiny"
VOCABULARY = 2048
WAIT_SECONDS = 10.0
M = TypeVar("M", bound=Message)


def service_info(**changes: Any) -> ServiceInfo:
    fields: dict[str, Any] = {
        "model_digest": "d" * 64,
        "cache_format": "fp32/test",
        "vocab_size": VOCABULARY,
        "context_length": 8192,
        "block_tokens": 128,
        "keep_tokens": 1,
        "eos_ids": [2],
    }
    return ServiceInfo(**{**fields, **changes})


class World:
    """`turn` runs the tokenizer's loop until a condition holds; the two ends collect what they get."""

    def __init__(self, folder: Path, **config: Any) -> None:
        secret = secrets.token_bytes(16)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.at_router: list[tuple[Message, list[bytes]]] = []
        self.at_frontend: list[tuple[Message, list[bytes]]] = []
        self.router = Listener(
            self.context,
            f"{folder}/router.sock",
            "router",
            7,
            secret,
            lambda _: Welcome(PROTOCOL_VERSION, "router", 7, 0, None),
        )
        fields = {"cache_secret": b"c" * 32, "model_dir": str(TINY), "served_models": ["tiny"], "limits": Limits()}
        self.config = TokenizerConfig(run_dir=str(folder), secret=secret, **{**fields, **config})
        self.tokenizer = Tokenizer(self.config, 0, 11)
        self.secret, self.folder = secret, folder
        self.frontend = self.dial_frontend(5)
        self.ids = RequestIds()
        self.turn_until(lambda: self.tokenizer.router.ready and self.frontend.ready, "links")

    def dial_frontend(self, generation: int) -> Dialer:
        hello = Hello(PROTOCOL_VERSION, "frontend", 0, generation, self.secret, 1)
        return Dialer(self.context, f"{self.folder}/tokenizer.0.sock", hello)

    def close(self) -> None:
        self.tokenizer.close()
        self.frontend.close()
        self.router.close()
        self.context.destroy(0)

    @property
    def peer(self) -> Peer:
        return self.router.by_name["tokenizer.0"]

    def turn(self) -> None:
        self.tokenizer.turn(0.005)
        now = time.monotonic()
        self.at_router += [(message, frames) for _, message, frames in self.router.drain(now)]
        self.at_frontend += self.frontend.drain(now)

    def turn_until(self, done: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not done():
            assert time.monotonic() < end, f"{what} did not come: {self.at_router} {self.at_frontend}"
            self.turn()

    def at(self, where: list[tuple[Message, list[bytes]]], kind: type[M], count: int = 1) -> list[M]:
        """At least `count` messages of one type at one of the ends."""
        self.turn_until(lambda: sum(isinstance(item, kind) for item, _ in where) >= count, kind.__name__)
        return [item for item, _ in where if isinstance(item, kind)]

    def publish(self, **changes: Any) -> None:
        """The router tells what the engines serve."""
        self.send(ServiceStatus("ok", "", 1, 1, service_info(**changes)))
        self.turn_until(lambda: self.tokenizer.service.status is not None, "status")

    def send(self, message: Message, *frames: bytes) -> None:
        assert self.router.send(self.peer, message, *frames)

    def ask(self, n: int = 1, route: str = "chat", sampling: Sampling | None = None, **fields: Any) -> Generate:
        """Send a request from the frontend's end."""
        sampling = sampling or Sampling()
        prompts = len(fields["prompts"]) if "prompts" in fields else 1
        shape = Shape(route, "tiny", True, n, False, False, sampling.logprobs, fields.pop("echo", False), True, prompts)
        if route == "chat":
            fields.setdefault("messages", [{"role": "user", "content": "Hello there"}])
        generate = Generate(self.ids.new(), "", shape, sampling, route, **fields)
        assert self.frontend.send(generate)
        return generate

    def until_begun(self, generate: Generate) -> None:
        """Until the request is encoded and on its way."""
        self.turn_until(lambda: generate.rid in self.tokenizer.service.table.sequences, "sequence")

    def submits(self, count: int = 1) -> list[tuple[Submit, list[int], bytes]]:
        """Requests that reached the router: message, prompt ids, keys."""
        self.at(self.at_router, Submit, count)
        return [
            (message, np.frombuffer(frames[0], np.int32).tolist(), frames[1])
            for message, frames in self.at_router
            if isinstance(message, Submit)
        ]

    def accept(self, *sids: int) -> None:
        self.send(Accepted(list(sids), [0] * len(sids), 2, "least-loaded"))

    def step(
        self,
        sid: int,
        offset: int,
        ids: list[int],
        reason: str = "",
        stop_id: int = -1,
        logprobs: SequenceLogprobs | None = None,
        code: str = "",
    ) -> None:
        """One step's output of one sequence."""
        usage = Usage(10, 128, 128)
        finished = [Finished(sid, 0, reason, offset + len(ids), usage, code, stop_id)] if reason else []
        message = StepOutput([sid], [0], [offset], [len(ids)], finished, [logprobs] if logprobs else [])
        self.send(message, np.array(ids, "<i4").tobytes())

    def deltas(self, sid: int) -> list[TextDelta]:
        return [
            delta
            for message, _ in self.at_frontend
            if isinstance(message, TextOutput)
            for delta in message.deltas
            if delta.sid == sid
        ]

    def until_end(self, sid: int) -> list[TextDelta]:
        """All deltas of a sequence that ends; their offsets fit together."""
        self.turn_until(lambda: any(delta.finish_reason or delta.error for delta in self.deltas(sid)), "end")
        found, sent = self.deltas(sid), 0
        for delta in found:
            assert delta.offset == sent
            sent += len(delta.text)
        return found


@contextmanager
def world(folder: Path, **config: Any) -> Iterator[World]:
    found = World(folder, **config)
    try:
        yield found
        found.tokenizer.service.table.check()
    finally:
        found.close()
