"""A live request: what has come for it and was not sent yet, how it ended, and the one coroutine that waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from api.errors import ApiError, failure
from wire.messages import CHOICE_MASK, Accepted, Shape, TextDelta, Usage

if TYPE_CHECKING:
    from frontend.hub import Hub, Link

COMPACT_PARTS = 256
MAX_PENDING = 2 << 20  # characters and bytes that a stream may hold for a reader that does not read
MAX_CHOICES = CHOICE_MASK + 1

log = logging.getLogger("deepinfer.frontend")


class Choice:
    """One choice: text not sent yet, and counts of what came."""

    __slots__ = ("dirty", "finish_reason", "index", "last", "logprobs", "parts", "seen", "started", "tokens", "usage")

    def __init__(self, index: int) -> None:
        self.index = index
        self.parts: list[str] = []
        self.logprobs: list[bytes] = []  # JSON arrays
        self.seen = 0  # characters that came
        self.tokens = 0  # ids behind them
        self.last = 0.0  # when the last of them came
        self.finish_reason = ""
        self.usage: Usage | None = None
        self.started = False  # a chunk of it was sent
        self.dirty = False


class LiveRequest:
    """From `Generate` on its way to the last byte of the answer.

    Waiting (no answer yet) → open (accepted) → ended (`error` set, or all choices finished). `gone`: nobody reads.
    """

    def __init__(self, rid: int, hub: Hub, link: Link, shape: Shape | None, now: float) -> None:
        self.rid, self.link, self.born = rid, link, now
        self._hub = hub
        self.shape: Shape | None = None
        self.choices: list[Choice] = []
        self.dirty: list[Choice] = []
        self.pending = 0
        self.accepted: Accepted | None = None
        self._accepted_choices = 0
        self._unfinished = -1
        self.error: ApiError | None = None
        self.released = False
        self.gone = False
        self.queued = False  # in the hub's list of requests to wake
        self.comment_due = False
        self.wrote = now
        self.cut: Callable[[], None] | None = None  # closes the client's connection at once
        self.sink: Callable[[], bool] | None = None  # writes what has come; False: the coroutine must do it
        self.deadline: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        if shape is not None:
            self._take_shape(shape)

    def _take_shape(self, shape: Shape) -> None:
        self.shape = shape
        self.choices = [Choice(index) for index in range(shape.n)]
        self._unfinished = shape.n

    @property
    def open(self) -> bool:
        """Every choice is in an engine's queue."""
        return self.accepted is not None and self._accepted_choices >= len(self.choices)

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def sids(self) -> list[int]:
        """Ids of the choices that have not finished; of all possible ones while their number is unknown."""
        if self.shape is None:
            return [self.rid | choice for choice in range(MAX_CHOICES)]
        return [self.rid | choice.index for choice in self.choices if not choice.finish_reason]

    # --- what the hub tells ---------------------------------------------------------------------------------------

    def on_accepted(self, message: Accepted) -> None:
        if self.shape is None:
            if message.shape is None:
                log.error("an unparsed request was accepted without its shape")
                self._hub.end(self, failure("internal_error"), "admin")
                return
            self._take_shape(message.shape)
        if self.accepted is None:
            self.accepted = message
        self._accepted_choices += len(message.sids)
        if self.open:
            self.wake()

    def push(self, delta: TextDelta, now: float) -> None:
        """Take new text of one choice."""
        index = delta.sid & CHOICE_MASK
        if index >= len(self.choices):
            log.error("output for a choice that does not exist")
            self._hub.end(self, failure("internal_error"), "admin")
            return
        choice = self.choices[index]
        if delta.error:
            self._hub.end(self, failure(delta.error), "" if len(self.choices) == 1 else "admin")
            return
        if choice.finish_reason:
            return
        text, logprobs = delta.text, delta.logprobs
        if delta.offset != choice.seen:
            if delta.offset > choice.seen:
                log.error("text is missing between two deltas of a request")
                self._hub.end(self, failure("internal_error"), "admin")
                return
            text, logprobs = self._unsent(choice, delta)
        if text:
            choice.parts.append(text)
            choice.seen += len(text)
            if len(choice.parts) > COMPACT_PARTS:
                choice.parts[:] = ["".join(choice.parts)]
        if logprobs:
            choice.logprobs.append(logprobs)
        self._count(choice, delta.tokens, now)
        if delta.finish_reason:
            choice.finish_reason, choice.usage = delta.finish_reason, delta.usage
            self._unfinished -= 1
        elif not text and not logprobs:
            return
        if not choice.dirty:
            choice.dirty = True
            self.dirty.append(choice)
        self.pending += len(text) + len(logprobs)
        if self._unfinished == 0:
            self._hub.release(self)
        if self.shape is not None and self.shape.stream:
            if self.pending > MAX_PENDING:
                self._hub.stall(self)
            elif not self.queued:
                self.queued = True
                self._hub.to_wake.append(self)
        elif self._unfinished == 0:
            self.wake()

    def _count(self, choice: Choice, tokens: int, now: float) -> None:
        new = tokens - choice.tokens
        if new <= 0:
            return
        metrics = self._hub.metrics
        if choice.tokens:
            metrics.inter_token.observe((now - choice.last) / new, new)
        elif choice.index == 0:
            metrics.first_token.observe(now - self.born)
        choice.tokens, choice.last = tokens, now

    def _unsent(self, choice: Choice, delta: TextDelta) -> tuple[str, bytes]:
        """The part of a repeated delta that did not come before (a tokenizer that resumed may repeat)."""
        text = delta.text[choice.seen - delta.offset :]
        new = delta.tokens - choice.tokens
        if not delta.logprobs or new <= 0:
            return text, b""
        entries = msgspec.json.decode(delta.logprobs, type=list[msgspec.Raw])
        return text, msgspec.json.encode(entries[-new:])

    # --- what the answering coroutine does ------------------------------------------------------------------------

    def wake(self) -> None:
        if (waiter := self._waiter) is not None and not waiter.done():
            waiter.set_result(None)

    def deliver(self) -> None:
        """New text is there for a stream."""
        if self.sink is None or not self.sink():
            self.wake()

    async def wait(self) -> None:
        """Until `wake`. Only the coroutine that answers the request waits here."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def wait_open(self) -> None:
        """Until the request is accepted; raises its error when it is refused before."""
        while not self.open and not self.gone:
            if self.error is not None:
                raise _for_http(self.error)
            await self.wait()

    async def wait_end(self) -> None:
        """Until all choices have finished; raises the error that ended the request instead."""
        while not self.finished and not self.gone:
            if self.error is not None:
                raise _for_http(self.error)
            await self.wait()


def _for_http(error: ApiError) -> ApiError:
    """An error that ends a request before its first byte; an abort from inside exists as an event only."""
    return failure("engine_unavailable") if error.code == "request_aborted" else error
