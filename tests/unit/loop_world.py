"""An engine's loop in this process with the mock model, and a real listener that plays its router."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq

from engine_proc import assembly
from engine_proc.config import EngineConfig
from engine_proc.mock_main import load
from engine_proc.mock_model import MockModel, read_model
from tests.unit.engine_world import params
from wire.child import Child
from wire.keys import block_keys, root_key
from wire.link import Listener, Peer
from wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Finished,
    Hook,
    HookReply,
    Message,
    Params,
    Rejected,
    SequenceLogprobs,
    Stats,
    StepOutput,
    Submit,
    Welcome,
)

TINY = Path(__file__).resolve().parents[1] / "fixtures" / "tiny"
WAIT_SECONDS = 10.0
M = TypeVar("M", bound=Message)
_MODELS: dict[int, MockModel] = {}


def tiny_model(block_tokens: int = 128) -> MockModel:
    if block_tokens not in _MODELS:
        _MODELS[block_tokens] = read_model(TINY, block_tokens)
    return _MODELS[block_tokens]


class Quiet:
    """Takes the place of the child frame while a model is loaded."""

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        pass


class LoopWorld:
    """`until` runs the engine's turns until a condition holds. `ids`, `ends`: by sid."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder, self.secret = folder, secrets.token_bytes(16)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        fields = {"test_hooks": True, "device_blocks": 256, "max_running": 8, "cache_secret": b"c" * 32}
        self.config = EngineConfig(
            str(folder), self.secret, 0, 1, "mock", str(TINY), "cpu", "auto", **{**fields, **config}
        )
        self.router = self.listen(7)
        self.connection = assembly.Connection(self.config, 5)
        child: Child = Quiet()  # type: ignore[assignment]  # only its phase is used
        loaded = load(child, self.config)
        self.info = assembly.engine_info(self.config, loaded.facts, loaded.num_blocks)
        runner = loaded.make_runner(loaded.num_blocks)
        self.engine = assembly.assemble(
            self.config, loaded.facts, self.info, loaded.num_blocks, runner, self.connection.link, loaded.depth
        )
        self.inbox: list[tuple[Message, list[bytes]]] = []
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, Finished] = {}
        self.attempts: dict[int, int] = {}
        self.records: list[SequenceLogprobs] = []
        self._next = 0
        self.connection.link.greet(self.info)
        self.until(lambda: self.peer is not None and self.peer.engine is not None, "the engine says hello")

    def listen(self, generation: int) -> Listener:
        welcome = Welcome(PROTOCOL_VERSION, "router", generation, 0, None)
        return Listener(
            self.context, f"{self.folder}/router.sock", "router", generation, self.secret, lambda _: welcome
        )

    def restart_router(self) -> None:
        self.router.close()
        (self.folder / "router.sock").unlink(missing_ok=True)
        self.router = self.listen(8)
        self.ids.clear()
        self.ends.clear()

    @property
    def peer(self) -> Peer | None:
        return self.router.by_name.get("engine.0")

    def read(self) -> None:
        """What the engine has sent; ids must follow each other."""
        for _, message, frames in self.router.drain(time.monotonic()):
            self.inbox.append((message, frames))
            if not isinstance(message, StepOutput):
                continue
            ids = np.frombuffer(frames[0], np.int32).tolist()
            for sid, attempt, offset, count in zip(
                message.sids, message.attempts, message.offsets, message.counts, strict=True
            ):
                if self.attempts.setdefault(sid, attempt) != attempt:
                    self.attempts[sid], self.ids[sid] = attempt, []
                have = self.ids.setdefault(sid, [])
                assert offset <= len(have), "ids are missing"
                have[offset:] = ids[:count]
                ids = ids[count:]
            assert not ids
            self.records += message.logprobs
            for finished in message.finished:
                before = self.ends.get(finished.sid)
                assert before is None or before.attempt != finished.attempt, "two ends"
                self.ends[finished.sid] = finished

    def turn(self, timeout: float = 0.01) -> None:
        self.engine.turn(timeout)
        self.read()

    def until(self, done: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"not in time: {what}"
            self.turn()

    def send(self, message: Message, *frames: bytes) -> None:
        assert self.peer is not None
        assert self.router.send(self.peer, message, *frames)

    def submit(
        self,
        prompt: list[int],
        wish: Params | None = None,
        produced: list[int] | None = None,
        attempt: int = 0,
        sid: int = 0,
    ) -> int:
        """Sends a request as the router does; → its sid."""
        if not sid:
            self._next += 1
            sid = self._next << 8
        raw = np.array(prompt, np.int32).tobytes()
        root = root_key(self.config.cache_secret, self.info.model_digest, self.info.cache_format, "")
        keys = b"".join(block_keys(root, raw, self.info.block_tokens, self.config.key_bits))
        message = Submit(sid, attempt, 1, "", wish or params())
        self.send(message, raw, keys, np.array(produced or [], np.int32).tobytes())
        return sid

    def ended(self, *sids: int, seconds: float = WAIT_SECONDS) -> list[Finished]:
        self.until(lambda: all(sid in self.ends for sid in sids), "the sequences end", seconds)
        return [self.ends[sid] for sid in sids]

    def of(self, kind: type[M]) -> list[M]:
        return [message for message, _ in self.inbox if isinstance(message, kind)]

    def accepted(self) -> list[int]:
        return [sid for message in self.of(Accepted) for sid in message.sids]

    def rejected(self) -> list[Rejected]:
        return self.of(Rejected)

    def hook(self, name: str, **args: Any) -> HookReply:
        self._next += 1
        query = self._next
        self.send(Hook(query, 0, name, args))
        self.until(lambda: any(reply.query == query for reply in self.of(HookReply)), "the hook is answered")
        return next(reply for reply in self.of(HookReply) if reply.query == query)

    def stats(self) -> Stats:
        """Numbers that are told from now on."""
        before = len(self.of(Stats))
        self.until(lambda: len(self.of(Stats)) > before, "the engine tells its numbers")
        return self.of(Stats)[-1]

    def idle(self) -> None:
        """The idle invariant."""
        self.until(lambda: self.engine.idle, "the engine is idle")
        self.engine.scheduler.check()
        counts = self.engine.scheduler.pool.counts()
        assert counts.pinned == 0 and counts.free + counts.cached == counts.total
        assert not self.engine.outbox.blocked

    def close(self) -> None:
        self.connection.close()
        self.router.close()
        self.context.destroy(0)


@contextmanager
def loop_world(folder: Path, **config: Any) -> Iterator[LoopWorld]:
    """A world for the time of a with block; the idle invariant is checked at its end."""
    world = LoopWorld(folder, **config)
    try:
        yield world
        world.idle()
    finally:
        world.close()
