"""HTTP/1.1 as strict as the contract: uvicorn's httptools protocol, which here refuses what it would let pass.

llhttp itself refuses bad framing (both lengths, two lengths, bad chunks, spaces, bare line feeds, folds). Added here:
limits on the head, a time for the head, only plain `chunked`, no upgrades, no trailers among the headers, errors as
the contract's object, and an end of the connection after a refusal that neither runs what lies behind nor cuts an
answer that is under way.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.errors import INVALID, ApiError
from frontend.exchange import CONNECTION, BodyWriter, new_request_id

MAX_HEAD_BYTES = 64 << 10
MAX_FIELDS = 100
MAX_PIPELINED = 8
LINGER_SECONDS = 2.0
SEND_BUFFER_BYTES = 128 << 10  # the kernel would take megabytes, and a reader that does not read would go unnoticed
MALFORMED = (400, "invalid_value", "the HTTP request is malformed")
HEAD_TOO_LARGE = (431, "request_too_large", "the request's headers are too large")
HEAD_TOO_SLOW = (408, "request_timeout", "the request's headers were not complete in time")


class _Refused(Exception):
    """Raised inside a parser callback: this request is not taken."""


class _BodyWriter:
    """See `exchange.BodyWriter`."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write

    def ready(self) -> bool:
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            self._flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, body: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


class StrictProtocol(HttpToolsProtocol):
    """One connection. `count(status)` is told of each answer that the application does not see."""

    def __init__(
        self, *args: Any, head_seconds: float, stall_seconds: float, count: Callable[[int], None], **kwargs: Any
    ) -> None:
        self._head_seconds, self._stall_seconds, self._count = head_seconds, stall_seconds, count
        self.stalled = False  # the connection was cut because its client did not read
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._heard = False
        self._why = MALFORMED
        self._refused = False
        self._message: RequestResponseCycle | None = None  # of the message being parsed, once its head is complete
        self._running: RequestResponseCycle | None = None
        super().__init__(*args, **kwargs)

    # --- the connection -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stop_stall_timer()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        super().connection_lost(exc)
        # uvicorn tells only the newest request of the connection, which with pipelining is not the one that runs.
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._heard = True
        self._unset_keepalive_if_required()
        began_before = self._in_head
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse()
            return
        if self._in_head:
            # A header is told only when it is whole: bytes count as they arrive.
            self._head_bytes += len(data) if began_before else 0
            if self._head_bytes > MAX_HEAD_BYTES:
                self._why = HEAD_TOO_LARGE
                self._refuse()
            else:
                self._arm()
        elif self._running is None or self._running.response_complete:
            self._arm()  # line ends between requests must not keep a connection for ever
        else:
            self._disarm()

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self._head_too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if self._heard and self._in_head:
            self._why = HEAD_TOO_SLOW
            self._refuse()
        elif self._running is None or self._running.response_complete:
            self.transport.close()

    def cut(self) -> None:
        """End the connection at once, whatever was not sent yet."""
        self.transport.abort()

    def body_writer(self) -> BodyWriter:
        """For the chunked answer that has just been started."""
        assert self._running is not None
        return _BodyWriter(self._running)

    # --- readers that do not read ---------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._stop_stall_timer()
        self._stall_timer = self.loop.call_later(self._stall_seconds, self._check_progress)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_progress(self) -> None:
        # Nobody writes while writing is paused: what waits can only become less.
        waiting = self.transport.get_write_buffer_size()
        if waiting < self._unread:
            self._unread = waiting
            self._stall_timer = self.loop.call_later(self._stall_seconds, self._check_progress)
        else:
            self._stall_timer = None
            self.stalled = True
            self.cut()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.cut()  # closing would wait for a reader that has not read all this time
        else:
            super().timeout_keep_alive_handler()

    # --- the parser -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes, self._message = True, 0, None
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > MAX_HEAD_BYTES:
            self._fail(HEAD_TOO_LARGE)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: it may not change what was decided from the headers
        super().on_header(name, value)
        size = len(self.url) + sum(len(key) + len(item) for key, item in self.headers)
        if len(self.headers) > MAX_FIELDS or size > MAX_HEAD_BYTES:
            self._fail(HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._in_head = False
        version = self.parser.get_http_version()
        coding = [value for name, value in self.headers if name == b"transfer-encoding"]
        if (
            version not in ("1.0", "1.1")
            or self.parser.should_upgrade()
            or (coding and (version == "1.0" or coding[0].strip().lower() != b"chunked"))
        ):
            self._fail(MALFORMED)
        cast(dict[str, Any], self.scope)["extensions"] = {CONNECTION: self}
        super().on_headers_complete()
        self._message = self.cycle
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # else a client that leaves would not be noticed

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._message = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # --- refusals -------------------------------------------------------------------------------------------------

    def _fail(self, why: tuple[int, str, str]) -> None:
        self._why = why
        raise _Refused

    def send_400_response(self, msg: str) -> None:
        self._refuse()

    def _refuse(self) -> None:
        """Answer the message being parsed with an error and end the connection; nothing behind it is run."""
        self._refused = True
        self._disarm()
        running, own = self._running, self._message
        if running is not None and not running.response_complete:
            if running is not own:
                # An earlier request is being answered: its answer is the last on this connection.
                self.pipeline.clear()
                running.keep_alive = False
                return
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.close()
                return
        self.pipeline.clear()
        self._answer(*self._why)

    def _answer(self, status: int, code: str, message: str) -> None:
        self._count(status)
        body = ApiError(status, INVALID, code, None, message).body()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        # Closing while bytes wait unread would send a reset and could destroy the answer: end the writing side first.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
