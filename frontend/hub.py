"""The frontend's links: requests out to tokenizers, text back to live requests, and the router's state and answers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import zlib
from typing import Any

import zmq

from api.errors import ApiError, failure, retry_after
from frontend.config import FrontendConfig
from frontend.live import LiveRequest
from frontend.metrics import Metrics
from wire.child import Control
from wire.link import Dialer
from wire.messages import (
    CHOICE_MASK,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Generate,
    Hello,
    Hook,
    HookReply,
    MetricsQuery,
    MetricsReply,
    Refused,
    Rejected,
    RequestIds,
    ServiceStatus,
    Shape,
    Stats,
    TextOutput,
    Welcome,
    rid_of,
)

TICK_SECONDS = 0.25
GREET_SECONDS = 1.0
DRAIN_LIMIT = 1000
REQUEST_MASK = ~CHOICE_MASK
IN_BAND = frozenset({"internal_error", "engine_unavailable", "shutting_down", "request_aborted", "request_timeout"})

log = logging.getLogger("deepinfer.frontend")


class Link:
    """One dialer and whether its listener can be given work. `aborts` wait for room in its queue."""

    def __init__(self, name: str, dialer: Dialer) -> None:
        self.name, self.dialer = name, dialer
        self.fd = int(dialer.socket.getsockopt(zmq.FD))
        self.up = False
        self.read_due = False
        self.greeted = 0.0
        self.aborts: list[Abort] = []


class Hub:
    """All links and all live requests of this process. Everything runs on the event loop's thread."""

    def __init__(self, config: FrontendConfig, index: int, generation: int, metrics: Metrics) -> None:
        self.config, self.metrics, self.name = config, metrics, f"frontend.{index}"
        self.live: dict[int, LiveRequest] = {}
        self.streams: set[LiveRequest] = set()  # streams under way, also those whose last bytes are not out yet
        self.to_wake: list[LiveRequest] = []
        self.status: ServiceStatus | None = None
        self.status_at = 0.0
        self._ids = RequestIds()
        self._loop = asyncio.get_running_loop()
        self.refused: asyncio.Future[str] = self._loop.create_future()  # why a listener will not have this process
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._next_query = 0
        self._last_stats: Stats | None = None
        self._closing = False

        def dial(path: str) -> Dialer:
            hello = Hello(PROTOCOL_VERSION, "frontend", index, generation, config.secret, os.getpid())
            return Dialer(self._context, f"{config.run_dir}/{path}", hello)

        self.router = Link("router", dial("router.sock"))
        self.tokenizers = [Link(f"tokenizer.{i}", dial(f"tokenizer.{i}.sock")) for i in range(config.tokenizers)]
        self._links = [self.router, *self.tokenizers]
        for link in self._links:
            self._loop.add_reader(link.fd, self._read, link)
        self._ticking = self._loop.call_soon(self._tick)

    def close(self) -> None:
        self._ticking.cancel()
        for link in self._links:
            link.up = False
            self._loop.remove_reader(link.fd)
            link.dialer.close()
        self._context.destroy(0)

    # --- requests -------------------------------------------------------------------------------------------------

    def new_rid(self) -> int:
        return self._ids.new()

    def submit(self, generate: Generate, shape: Shape | None, *frames: bytes) -> LiveRequest:
        """Send a request on its way; raises ApiError 503 when nobody can take it."""
        if self._closing:
            raise failure("shutting_down")
        key = f"{generate.tenant}\0{generate.session_key}" if generate.session_key else str(generate.rid)
        link = self._tokenizer_for(key)
        if link is None or not self.router.up or not self._send(link, generate, *frames):
            raise failure("engine_unavailable", self.retry_seconds())
        live = LiveRequest(generate.rid, self, link, shape, time.monotonic())
        self.live[generate.rid] = live
        self.metrics.live = len(self.live)
        if generate.timeout:
            live.deadline = self._loop.call_later(
                generate.timeout, self.end, live, failure("request_timeout"), "deadline"
            )
        return live

    def retry_seconds(self) -> int:
        return 1 if self.status is None else self.status.retry_after

    def _tokenizer_for(self, key: str) -> Link | None:
        start = zlib.crc32(key.encode())
        count = len(self.tokenizers)
        return next(
            (link for i in range(count) if (link := self.tokenizers[(start + i) % count]).up),
            None,
        )

    def release(self, live: LiveRequest) -> None:
        """Free what a request holds here. The one place; more calls change nothing."""
        if live.released:
            return
        live.released = True
        del self.live[live.rid]
        self.metrics.live = len(self.live)
        self.metrics.request.observe(time.monotonic() - live.born)
        if live.deadline is not None:
            live.deadline.cancel()

    def end(self, live: LiveRequest, error: ApiError, reason: str) -> None:
        """End a request with an error: whatever of it still runs is aborted with `reason` ("": nothing runs)."""
        if live.released:
            return
        if reason:
            self._abort(live, reason)
        live.error = error
        self.release(live)
        live.wake()

    def leave(self, live: LiveRequest) -> None:
        """The client is gone."""
        live.gone = True
        if not live.released:
            self.metrics.aborted += 1
            self._abort(live, "client")
            self.release(live)
        live.wake()

    def stall(self, live: LiveRequest) -> None:
        """A reader that does not read: its stream ends, whether or not its request does."""
        if live.gone:
            return
        self.metrics.stalled += 1
        live.gone = True
        if not live.released:
            self._abort(live, "stall")
            self.release(live)
        live.dirty.clear()
        live.choices.clear()
        if live.cut is not None:
            live.cut()
        live.wake()

    def shut_down(self) -> None:
        """End every request, and take none from now on (the body of one may still be on its way)."""
        self._closing = True
        for live in list(self.live.values()):
            self.end(live, failure("shutting_down"), "shutdown")

    def _abort(self, live: LiveRequest, reason: str) -> None:
        message = Abort(live.sids(), reason)
        # A listener that is lost has nothing left of the request; one whose queue is full is told later.
        if live.link.up and (live.link.aborts or not self._send(live.link, message)):
            live.link.aborts.append(message)

    # --- questions to the router ----------------------------------------------------------------------------------

    async def metrics_page(self, form: str, seconds: float) -> bytes:
        """A page made by the router ("prometheus" | "json"); raises ApiError 503 when it does not come in time."""
        page = await self._ask(lambda query: MetricsQuery(query, form), seconds)
        return bytes(page)

    async def hook(self, rank: int, name: str, args: dict[str, Any], seconds: float) -> HookReply:
        reply: HookReply = await self._ask(lambda query: Hook(query, rank, name, args), seconds)
        return reply

    async def _ask(self, make: Any, seconds: float) -> Any:
        self._next_query += 1
        query = self._next_query
        if not self.router.up or not self._send(self.router, make(query)):
            raise failure("engine_unavailable")
        future = self._queries[query] = self._loop.create_future()
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise failure("engine_unavailable") from None
        finally:
            self._queries.pop(query, None)

    def _answer(self, query: int, value: Any) -> None:
        if (future := self._queries.get(query)) is not None and not future.done():
            future.set_result(value)

    # --- links ----------------------------------------------------------------------------------------------------

    def _send(self, link: Link, message: Any, *frames: bytes) -> bool:
        sent = link.dialer.send(message, *frames)
        # The socket's descriptor is edge-triggered and a send may swallow its edge: look once more afterwards.
        if not link.read_due:
            link.read_due = True
            self._loop.call_soon(self._read, link)
        return sent

    def _read(self, link: Link) -> None:
        link.read_due = False
        now = time.monotonic()
        for message, frames in link.dialer.drain(now, DRAIN_LIMIT):
            if type(message) is TextOutput:
                self._on_text(message, now)
            else:
                self._on_message(link, message, frames, now)
        if self.to_wake:
            for live in self.to_wake:
                live.queued = False
                live.deliver()
            self.to_wake.clear()
        if int(link.dialer.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN and not link.read_due:
            link.read_due = True
            self._loop.call_soon(self._read, link)

    def _on_text(self, message: TextOutput, now: float) -> None:
        live = self.live
        for delta in message.deltas:
            found = live.get(delta.sid & REQUEST_MASK)
            if found is None:
                self.metrics.late += 1
            else:
                found.push(delta, now)

    def _on_message(self, link: Link, message: Any, frames: list[bytes], now: float) -> None:
        match message:
            case Accepted():
                live = self.live.get(rid_of(message.sids[0])) if message.sids else None
                if live is not None:
                    live.on_accepted(message)
                elif message.sids:  # it ended here while it was on its way
                    self._send(link, Abort(message.sids, "client"))
            case Rejected():
                if (live := self.live.get(rid_of(message.rid))) is not None:
                    self.end(live, _error(message, live.open), "" if len(live.choices) == 1 else "admin")
            case ServiceStatus():
                self.status, self.status_at = message, now
            case MetricsReply():
                self._answer(message.query, frames[0] if frames else b"")
            case HookReply():
                self._answer(message.query, message)
            case Welcome():
                self._lose(link)  # whatever was under way with the former generation is over
                link.up = True
                log.info("link to %s is up", link.name)
            case Refused():
                if not self.refused.done():
                    self.refused.set_result(f"{link.name} refused the link: {message.reason}")
            case _:
                link.dialer.counters.bad_messages += 1

    def lost(self, control: Control) -> None:
        """The launcher says that a child died."""
        link = self.router
        if control.role == "tokenizer":
            if not 0 <= control.index < len(self.tokenizers):
                return
            link = self.tokenizers[control.index]
        elif control.role != "router":
            return
        if link.dialer.peer_generation in (0, control.generation):
            self._lose(link)
            link.dialer.redial()

    def _lose(self, link: Link) -> None:
        link.up = False
        link.aborts.clear()
        if link is self.router:
            self.status = None
            for future in self._queries.values():
                if not future.done():
                    future.set_exception(failure("engine_unavailable"))
        for live in list(self.live.values()):
            if live.link is link or link is self.router:
                self.end(live, failure("engine_unavailable", self.retry_seconds()), "admin")

    # --- each quarter of a second ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(TICK_SECONDS, self._tick)
        now = time.monotonic()
        for link in self._links:
            if not link.up and link.dialer.ready and now - link.greeted > GREET_SECONDS:
                link.greeted = now
                link.dialer.greet()
            while link.up and link.aborts and self._send(link, link.aborts[0]):
                link.aborts.pop(0)
            self._read(link)
        self._watch_streams(now)
        self._send_stats()

    def _watch_streams(self, now: float) -> None:
        for live in list(self.streams):
            if now - live.wrote >= self.config.comment_seconds:
                live.comment_due = True
                live.wake()

    def _send_stats(self) -> None:
        counters = [link.dialer.counters for link in self._links]
        stats = self.metrics.stats(
            self.name, sum(item.bad_messages for item in counters), sum(item.gaps for item in counters)
        )
        if self.router.up and stats != self._last_stats and self._send(self.router, stats):
            self._last_stats = stats


def _error(message: Rejected, in_stream: bool) -> ApiError:
    if message.status == 500 or (in_stream and message.code not in IN_BAND):
        return failure("internal_error")
    headers = retry_after(message.retry_after) if message.status in (429, 503) else None
    return ApiError(message.status, message.type, message.code, message.param, message.text, headers)
