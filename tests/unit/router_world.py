"""A router's inside in this process, between real links: the test plays engines, tokenizers and frontends."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import zmq

from router_proc.config import RouterConfig
from router_proc.service import Router
from wire.link import Dialer
from wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    EngineInfo,
    Finished,
    Hello,
    Message,
    MetricsQuery,
    MetricsReply,
    Params,
    Refused,
    Rejected,
    RequestIds,
    StepOutput,
    Submit,
    Usage,
)

WAIT_SECONDS = 10.0
BLOCK = 128
M = TypeVar("M", bound=Message)


def engine_info(**changes: Any) -> EngineInfo:
    fields: dict[str, Any] = {
        "model_digest": "d" * 64,
        "cache_format": "fp32/test",
        "vocab_size": 2048,
        "context_length": 8192,
        "model_context_length": 8192,
        "pool_tokens": 65_536,
        "block_tokens": BLOCK,
        "keep_tokens": 1,
        "eos_ids": [2],
        "max_running": 64,
        "dtype": "fp32",
        "device": "cpu",
    }
    return EngineInfo(**{**fields, **changes})


def params(max_tokens: int = 100, **changes: Any) -> Params:
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 1,
        "max_tokens": max_tokens,
    }
    return Params(**{**fields, **changes})


def ids_of(*ids: int) -> bytes:
    return array("i", ids).tobytes()


class End:
    """The test's end of a link to the router. `got` holds what came: (message, frames)."""

    def __init__(self, world: World, role: str, index: int, info: EngineInfo | None = None, generation: int = 0):
        self.world, self.role, self.index = world, role, index
        self.generation = generation or secrets.randbits(40) | 1
        hello = Hello(PROTOCOL_VERSION, role, index, self.generation, world.secret, os.getpid(), info)
        self.dialer = Dialer(world.context, f"{world.config.run_dir}/router.sock", hello)
        self.got: list[tuple[Message, list[bytes]]] = []
        self.awake = True  # False: reads nothing, as a frozen process
        world.ends.append(self)

    def pump(self) -> None:
        if self.awake:
            self.got += self.dialer.drain(time.monotonic())

    def send(self, message: Message, *frames: bytes) -> None:
        assert self.dialer.send(message, *frames), "the link takes no message"

    def of(self, kind: type[M]) -> list[M]:
        return [message for message, _ in self.got if isinstance(message, kind)]

    def frames_of(self, kind: type[Message]) -> list[list[bytes]]:
        return [frames for message, frames in self.got if isinstance(message, kind)]

    def wait(self, kind: type[M], count: int = 1) -> list[M]:
        """Until at least `count` messages of this type have come; gives all of them."""
        self.world.until(lambda: len(self.of(kind)) >= count, f"{count} {kind.__name__} at {self.role}.{self.index}")
        return self.of(kind)

    def close(self) -> None:
        """As if the process had died."""
        self.dialer.close()
        self.world.ends.remove(self)

    def aborts(self) -> list[int]:
        """All sids that it was asked to end."""
        return [sid for message in self.of(Abort) for sid in message.sids]

    # --- an engine's words ----------------------------------------------------------------------------------------

    def accept(self, *sids: int, attempt: int = 0) -> None:
        self.send(Accepted(list(sids), [attempt] * len(sids)))

    def step(self, *parts: tuple[int, int, list[int]], **fields: Any) -> None:
        """One StepOutput of (sid, offset, ids) parts."""
        attempts = fields.pop("attempts", [0] * len(parts))
        message = StepOutput([p[0] for p in parts], attempts, [p[1] for p in parts], [len(p[2]) for p in parts])
        message.finished, message.logprobs = fields.get("finished", []), fields.get("logprobs", [])
        self.send(message, ids_of(*[item for p in parts for item in p[2]]))

    def finish(self, sid: int, count: int, reason: str = "stop", prompt: int = 10, **fields: Any) -> None:
        self.step(finished=[Finished(sid, 0, reason, count, Usage(prompt), **fields)])


class World:
    """`until` steps the router until a condition holds; all ends are read meanwhile."""

    def __init__(self, folder: str, ranks: int = 1, **config: Any) -> None:
        self.secret = secrets.token_bytes(16)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.config = RouterConfig(folder, self.secret, ranks=ranks, tokenizers=2, frontends=2, **config)
        self.ends: list[End] = []
        self.skew = 0.0  # seconds that the router's clock is ahead
        self.router = Router(self.config, 7, self.context)
        self.ids = RequestIds()
        self.tokenizer = self.dial("tokenizer", 0)

    def dial(self, role: str, index: int, info: EngineInfo | None = None, generation: int = 0) -> End:
        """A new process of this role, welcomed."""
        end = End(self, role, index, info, generation)
        self.until(lambda: end.dialer.ready or bool(end.of(Refused)), f"a welcome for {role}.{index}")
        return end

    def engines(self, **info: Any) -> list[End]:
        """A ready engine for each rank."""
        return [self.dial("engine", rank, engine_info(**info)) for rank in range(self.config.ranks)]

    def step(self) -> None:
        self.router.step(time.monotonic() + self.skew)
        for end in self.ends:
            end.pump()

    def until(self, done: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> None:
        poller = zmq.Poller()
        for socket in (self.router.listener.socket, *[end.dialer.socket for end in self.ends]):
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
            poller.poll(5)
            self.step()

    def settle(self) -> None:
        """Until what the ends have sent so far is with the router, and its answers are with them."""
        frontend = next((end for end in self.ends if end.role == "frontend" and end.dialer.ready), None)
        if frontend is None:
            frontend = self.dial("frontend", 0)
        for end in self.ends:
            if end.dialer.ready and end.awake and end.role == "engine":
                end.send(Accepted([], []))
            elif end.dialer.ready and end.role == "tokenizer":
                end.send(Abort([], "admin"))
        for number in range(3):  # links are independent: a few turns let them all through
            frontend.send(MetricsQuery(1_000_000 + number, "json"))
            count = len(frontend.of(MetricsReply)) + 1
            self.until(lambda count=count: len(frontend.of(MetricsReply)) >= count, "settled")  # type: ignore[misc]

    def request(
        self,
        tokens: int = 10,
        max_tokens: int = 100,
        keys: bytes | None = None,
        tokenizer: End | None = None,
        n: int = 1,
        **fields: Any,
    ) -> int:
        """Send a request, do not wait; gives its first sid. Keys are random unless given."""
        sid: int = self.ids.new() | fields.pop("choice", 0)
        chosen = fields.pop("params", None) or params(max_tokens)
        submit = Submit(sid, 0, n, fields.pop("tenant", ""), chosen, **fields)
        keys = secrets.token_bytes(32 * (tokens // BLOCK)) if keys is None else keys
        (tokenizer or self.tokenizer).send(submit, ids_of(*[sid >> 8 & 0xFF] * tokens), keys)
        return sid

    def placed(self, **fields: Any) -> tuple[int, End]:
        """Send a request of one sequence, and give its sid and the engine that gets it."""
        sid = self.request(**fields)
        found: list[End] = []

        def there() -> bool:
            found[:] = [end for end in self.ends if sid in [submit.sid for submit in end.of(Submit)]]
            return bool(found) or bool(self.rejections(sid))

        self.until(there, "the request is placed")
        assert found, self.rejections(sid)
        return sid, found[0]

    def rejections(self, sid: int) -> list[Rejected]:
        return [item for end in self.ends for item in end.of(Rejected) if item.rid == sid & ~0xFF]

    def running(self, **fields: Any) -> tuple[int, End]:
        """A sequence that has produced the ids 1, 2, 3."""
        sid, engine = self.placed(**fields)
        engine.accept(sid)
        engine.step((sid, 0, [1, 2, 3]))
        self.until(lambda: len(self.sequence(sid).produced) == 3, "three ids")
        return sid, engine

    def sequence(self, sid: int) -> Any:
        return self.router.live.journal.sequences[sid]

    def text_of(self, sid: int, tokenizer: End | None = None) -> list[int]:
        """All ids that a tokenizer got for a sequence; asserts that they join without gap or repeat."""
        found: list[int] = []
        for message, frames in (tokenizer or self.tokenizer).got:
            if isinstance(message, StepOutput):
                ids, position = array("i", frames[0]), 0
                for item, offset, count in zip(message.sids, message.offsets, message.counts, strict=True):
                    if item == sid:
                        assert offset == len(found)
                        found += ids[position : position + count]
                    position += count
        return found

    def ends_of(self, sid: int, tokenizer: End | None = None) -> list[Finished]:
        outputs = (tokenizer or self.tokenizer).of(StepOutput)
        return [item for message in outputs for item in message.finished if item.sid == sid]

    def page(self, form: str = "prometheus") -> str:
        frontend = next((end for end in self.ends if end.role == "frontend"), None) or self.dial("frontend", 0)
        before = len(frontend.of(MetricsReply))
        frontend.send(MetricsQuery(before, form))
        frontend.wait(MetricsReply, before + 1)
        return frontend.frames_of(MetricsReply)[-1][0].decode()

    def close(self) -> None:
        for end in list(self.ends):
            end.close()
        self.router.close()
        self.context.destroy(0)


@contextmanager
def world(ranks: int = 1, **config: Any) -> Iterator[World]:
    """A router; at the end nothing is left of the requests that have ended."""
    with tempfile.TemporaryDirectory(prefix="dir") as folder:
        found = World(folder, ranks, **config)
        try:
            yield found
        finally:
            found.close()


def idle(found: World) -> None:
    """Nothing is left of any request."""
    found.until(lambda: not found.router.live.journal.sequences, "all sequences are released")
    found.router.check()
