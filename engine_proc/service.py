"""The engine's loop, the same for every model: poll, schedule, run, publish. Everything runs on one thread."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zmq

from engine_proc.blocks import PoolError
from engine_proc.config import EngineConfig
from engine_proc.outbox import Outbox
from engine_proc.plan import SlotState, StepPlan, StepResult
from engine_proc.scheduler import Output, Scheduler, Step
from engine_proc.sequence import ID_BYTES, Sequence
from engine_proc.stats import EngineStats
from wire.child import Control
from wire.keys import KEY_BYTES
from wire.link import Dialer
from wire.messages import (
    Abort,
    EngineInfo,
    Finished,
    Hook,
    HookReply,
    Message,
    Refused,
    Rejected,
    Resync,
    Stats,
    Submit,
    Usage,
    Welcome,
    rid_of,
)

TICK_SECONDS = 0.25
RETRY_SECONDS = 0.01  # until what could not be sent is tried again
LOOK_SECONDS = 0.01  # how often a busy loop looks at other descriptors than the router's
CHECK_SECONDS = 0.5  # of idleness, then the pools are checked
MOST_HANG_SECONDS = 3600.0

log = logging.getLogger("deepinfer.engine")


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Waits for it."""
        ...


class Runner(Protocol):
    """What runs steps: a model on a device, or a script."""

    def open_slot(self, slot: int, state: SlotState) -> None: ...
    def close_slot(self, slot: int) -> None: ...
    def launch(self, plan: StepPlan) -> Pending:
        """Enqueues a step and waits for nothing."""
        ...


class Watch(Protocol):
    """`since`: when the step under way began (monotonic seconds), 0.0 = none."""

    since: float


@dataclass(slots=True)
class _NoWatch:
    since: float = 0.0


class Engine:
    """One rank. `depth`: steps that may be under way while the next one is planned."""

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        runner: Runner,
        scheduler: Scheduler,
        link: Dialer,
        depth: int,
        watch: Watch | None = None,
    ) -> None:
        self.config, self.info, self.scheduler, self.link = config, info, scheduler, link
        self.outbox = Outbox(link)
        self.stats = EngineStats(f"engine.{config.rank}", scheduler, link.counters)
        scheduler.on_start = lambda sequence: self.stats.started(time.monotonic() - sequence.arrived)
        self.refused = ""  # why the router does not want this engine
        self._runner, self._depth = runner, depth
        self._watch: Watch = watch or _NoWatch()
        self._pending: deque[tuple[Step, Pending]] = deque()
        self._poller = zmq.Poller()
        self._poller.register(link.socket, zmq.POLLIN)
        self._fd = -1
        self._sent: Stats | None = None
        self._next_tick = self._next_look = 0.0
        self._busy_at, self._checked = 0.0, False
        self._hang = 0.0

    def watch(self, fd: int) -> None:
        """Wake up for another descriptor too."""
        self._fd = fd
        self._poller.register(fd, zmq.POLLIN)

    @property
    def idle(self) -> bool:
        return not self.scheduler.sequences and not self._pending

    # --- loop -----------------------------------------------------------------------------------------------------

    def turn(self, timeout: float) -> bool:
        """Take what is there, run a step, send what follows; wait at most `timeout` seconds when there is nothing.

        True when the watched descriptor may be readable.
        """
        seen = self._wait(timeout)
        now = time.monotonic()
        for message, frames in self.link.drain(now):
            if not self._handle(message, frames, now):
                self.stats.bad_requests += 1
        if self.outbox.full:
            self.outbox.flush()
        else:
            self._step()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)
        if self._hang:
            self._do_hang()
        return seen

    def _wait(self, timeout: float) -> bool:
        now = time.monotonic()
        if self.idle or self.outbox.full:
            limits = [timeout, max(0.0, self._next_tick - now) if self._unsettled() else timeout]
            if self.outbox.blocked:
                limits.append(RETRY_SECONDS)
            wait = min(limits)
        elif now >= self._next_look:
            wait = 0.0
        else:
            return False
        self._next_look = now + LOOK_SECONDS
        return any(source == self._fd for source, _ in self._poller.poll(math.ceil(1000 * wait)))

    def _unsettled(self) -> bool:
        """There is something for the next tick: numbers to send, a check of the pools, a hello."""
        return not self._checked or not self.link.ready

    def _step(self) -> None:
        """Plan and launch the next step, then take the results that are due."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        if step is not None:
            began = self._watch.since = self._busy_at = time.monotonic()
            self._checked = False
            self._pending.append((step, self._runner.launch(step.plan())))
            self.stats.steps += 1
        elif not self._pending:
            assert not scheduler.sequences, "sequences wait, and nothing can run"
        output = None
        while self._pending and (step is None or len(self._pending) > self._depth):
            done, pending = self._pending.popleft()
            output = scheduler.complete(done, pending.result())
            self.outbox.put(output)
        if step is not None:
            self.stats.step_seconds += time.monotonic() - began
        self._watch.since = 0.0
        if finished := scheduler.take_finished():
            self.outbox.put(Output([], [], b"", [], finished))
        elif output is None:
            self.outbox.flush()

    def _tick(self, now: float) -> None:
        if not self._checked and self.idle and now - self._busy_at >= CHECK_SECONDS:
            self.scheduler.check()
            self._checked = True
        stats = self.stats.message()
        if stats != self._sent and self.link.ready and self.link.send(stats):
            self._sent = stats

    # --- messages -------------------------------------------------------------------------------------------------

    def _handle(self, message: Message, frames: list[bytes], now: float) -> bool:
        """False for a message that the router does not send, or that is no good."""
        match message:
            case Submit():
                return self._submit(message, frames, now)
            case Abort():
                for sid in message.sids:
                    self.stats.late_aborts += not self.scheduler.abort(sid)
            case Resync():
                return self._resync(message)
            case Welcome():
                self.drop_all()  # whatever was under way with its former generation is over
            case Refused():
                self.refused = message.reason
            case Hook():
                self._hook(message)
            case _:
                return False
        return True

    def _submit(self, message: Submit, frames: list[bytes], now: float) -> bool:
        known = self.scheduler.sequences.get(message.sid)
        if known is not None:
            if known.attempt >= message.attempt:
                return False
            self.scheduler.abort(message.sid)
        why = self._wrong(message, frames)
        if why:
            log.error("a request was refused: %s", why)
            self._fail_unborn(message, 0 if len(frames) < 1 else len(frames[0]) // ID_BYTES)
            return False
        prompt, keys, produced = frames
        tokens = len(prompt) // ID_BYTES + message.params.max_tokens
        if tokens > self.info.context_length or not self.scheduler.fits(tokens):
            self.outbox.tell(self._too_long(message, tokens))
            return True
        if not self.config.test_hooks:
            message.params.hooks = None
        try:
            self._check_admission_hook(message)
            sequence = Sequence(
                message.sid,
                message.attempt,
                message.tenant,
                message.params,
                prompt,
                [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)],
                produced,
                self.info.eos_ids,
                self.info.block_tokens,
                now,
            )
        except Exception as error:  # noqa: BLE001  whatever it is: only this sequence fails
            log.error("a sequence could not be admitted: %s", type(error).__name__)
            self._fail_unborn(message, len(prompt) // ID_BYTES)
            return True
        self.outbox.accept(sequence)
        self.scheduler.submit(sequence)
        return True

    def _check_admission_hook(self, message: Submit) -> None:
        if message.params.hooks is not None and message.params.hooks.get("fail_admit"):
            raise RuntimeError("injected at admission")

    def _wrong(self, message: Submit, frames: list[bytes]) -> str:
        """What is wrong with a request as a message; "" if nothing is."""
        if len(frames) != 3 or any(len(frame) % size for frame, size in zip(frames, (4, KEY_BYTES, 4), strict=True)):
            return "it needs frames of ids, keys and ids"
        prompt, keys, produced = frames
        if not prompt or message.n != 1 or message.params.max_tokens < 1:
            return "it has no prompt, nothing to produce, or several sequences"
        if len(keys) // KEY_BYTES > len(prompt) // ID_BYTES // self.info.block_tokens:
            return "it has more keys than full blocks"
        for raw in (prompt, produced):  # a negative id is a large one when read without its sign
            if raw and np.frombuffer(raw, np.uint32).max() >= self.info.vocab_size:
                return "it has ids that are not in the vocabulary"
        return ""

    def _fail_unborn(self, message: Submit, prompt_tokens: int) -> None:
        """The end of a sequence that never was in the queue."""
        end = Finished(message.sid, message.attempt, "error", 0, Usage(prompt_tokens), "internal_error")
        self.outbox.put(Output([], [], b"", [], [end]))

    def _too_long(self, message: Submit, tokens: int) -> Rejected:
        text = (
            f"This model's maximum context length is {self.info.context_length} tokens; {tokens} tokens were asked for."
        )
        code = "context_length_exceeded"
        return Rejected(rid_of(message.sid), 400, "invalid_request_error", code, None, text)

    def _resync(self, message: Resync) -> bool:
        """The router misses ids: send them again. One that has ended here is not live, and its end stands."""
        if len(message.sids) != len(message.offsets):
            return False
        good = True
        for sid, offset in zip(message.sids, message.offsets, strict=True):
            sequence = self.scheduler.sequences.get(sid)
            if sequence is not None:
                good = self.outbox.repeat(sequence, offset) and good
        return good

    def drop_all(self) -> None:
        """The router of all these sequences is gone."""
        self.scheduler.drop_all()
        self.outbox.clear()
        self._sent = None

    def lost(self, control: Control) -> None:
        """The launcher says that a child died."""
        if control.role == "router" and self.link.peer_generation in (0, control.generation):
            self.drop_all()
            self.link.redial()

    # --- test hooks -----------------------------------------------------------------------------------------------

    def _hook(self, message: Hook) -> None:
        ok, result = True, None
        try:
            if not self.config.test_hooks:
                raise ValueError("test hooks are off")
            result = self._run_hook(message.name, message.args)
        except (ValueError, TypeError, PoolError, AssertionError) as error:
            ok, result = False, str(error)
        self.outbox.tell(HookReply(message.query, ok, result))

    def _run_hook(self, name: str, args: dict[str, Any]) -> Any:
        """Raises ValueError for an unknown name or arguments, PoolError or AssertionError from a check."""
        pool = self.scheduler.pool
        match name:
            case "flush_device_cache":
                return {"dropped": pool.flush()}
            case "drop_cached_block":
                block = pool.holds(bytes.fromhex(args["key"])) if "key" in args else pool.newest()
                return {"dropped": pool.drop([block]) if block >= 0 else 0}
            case "check_pools":
                self.scheduler.check()
                counts = pool.counts()
                return {"total": counts.total, "free": counts.free, "cached": counts.cached, "pinned": counts.pinned}
            case "hang":
                seconds = float(args.get("seconds", MOST_HANG_SECONDS))
                if not 0 < seconds <= MOST_HANG_SECONDS:
                    raise ValueError(f"seconds must be a number above 0 and at most {MOST_HANG_SECONDS:g}")
                self._hang = seconds
                return {"seconds": seconds}
        raise ValueError(f"there is no hook {name!r} in an engine")

    def _do_hang(self) -> None:
        """As a step that does not end: the watchdog sees it."""
        seconds, self._hang = self._hang, 0.0
        self.outbox.flush()
        self._watch.since = time.monotonic()
        time.sleep(seconds)
        self._watch.since = 0.0
