"""One HTTP exchange: the headers we read, the body under its limits, and answers that always carry a request id."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from api.errors import INVALID, ApiError, invalid
from api.request import short_key
from frontend.config import FrontendConfig
from frontend.metrics import Metrics

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
JSON_TYPE = re.compile(r"application/(?:json|[a-z0-9.-]+\+json)")
SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
DISCARD_SECONDS = 10.0
DISCARD_IDLE_SECONDS = 1.0
DISCARD_BYTES = 256 << 20
SMALL_BODY = 1 << 20
CONNECTION = "deepinfer.connection"  # the ASGI extension in which our HTTP protocol shows itself

Headers = list[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class BodyWriter(Protocol):
    """Writes parts of a chunked answer that was started, at once and without a task switch."""

    def ready(self) -> bool:
        """Not while the client does not read, nor when the answer is over: then `send` is the way."""
        ...

    def write(self, body: bytes) -> None:
        """Some bytes, while `ready`."""
        ...


class Connection(Protocol):
    """What an exchange may know of and do to its connection."""

    stalled: bool

    def cut(self) -> None: ...
    def body_writer(self) -> BodyWriter: ...


class ClientGone(Exception):
    """The client left before its request was complete; there is nobody to answer."""


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class Exchange:
    """A request and the way to answer it."""

    def __init__(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, config: FrontendConfig, metrics: Metrics
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["raw_path"].decode("latin-1")
        self.receive, self._send = receive, send
        self.connection: Connection = scope["extensions"][CONNECTION]
        self.headers: dict[bytes, bytes] = {}
        self.repeated: set[bytes] = set()
        for name, value in scope["headers"]:
            if name in self.headers:
                self.repeated.add(name)
            self.headers[name] = value
        given = self.header(b"x-request-id")
        self.request_id = given if REQUEST_ID.fullmatch(given) else new_request_id()
        self.tenant = ""
        self.started = False
        self._config, self._metrics = config, metrics
        self._body_read = b"content-length" not in self.headers and b"transfer-encoding" not in self.headers

    def header(self, name: bytes) -> str:
        """A header's value, "" when it is absent."""
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def id_header(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self.request_id.encode()

    # --- in -------------------------------------------------------------------------------------------------------

    def require_json(self) -> None:
        """415 for anything that is not plain JSON."""
        kind = self.header(b"content-type").partition(";")[0].strip().lower()
        if not JSON_TYPE.fullmatch(kind):
            raise ApiError(415, INVALID, "unsupported_media_type", None, "the content type must be application/json")
        if b"content-encoding" in self.headers:
            raise ApiError(415, INVALID, "unsupported_media_type", None, "content encodings are not supported")

    async def body(self) -> bytes:
        """The whole body; ApiError 408 or 413 when it is too slow or too large, counted as bytes arrive."""
        limit = self._config.limits.max_body_bytes
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.body_timeout_seconds):
                while True:
                    event = await self.receive()
                    if event["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(event["body"])
                    size += len(event["body"])
                    if size > limit:
                        raise _too_large(limit)
                    if not event.get("more_body", False):
                        self._body_read = True
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise ApiError(408, INVALID, "request_timeout", None, "the body was not complete in time") from None

    def deadline(self) -> float:
        """`X-Request-Timeout` in seconds; 0.0 when there is none."""
        given = self.header(b"x-request-timeout").strip()
        if not given:
            return 0.0
        if not SECONDS.fullmatch(given) or float(given) <= 0:
            raise invalid("X-Request-Timeout", "X-Request-Timeout must be a positive number of seconds")
        return float(given)

    def session_key(self) -> str:
        """The session named by a header, "" when none is."""
        return short_key(self.header(b"x-session-id") or self.header(b"x-correlation-id"))

    # --- out ------------------------------------------------------------------------------------------------------

    async def answer(
        self, status: int, body: bytes, headers: Headers | None = None, kind: bytes = b"application/json"
    ) -> None:
        """A whole answer."""
        self.started = True
        self._metrics.count(status)
        out = [
            (b"content-type", kind),
            (b"content-length", str(len(body)).encode()),
            self.id_header,
            *(headers or []),
        ]
        # What is left of a large body would be answered by a reset, and the client would not see why it was refused:
        # the answer goes out, the rest of the body is read and dropped for a while, then the connection ends.
        long = int(self.headers.get(b"content-length", b"0")) > SMALL_BODY or b"transfer-encoding" in self.headers
        close = not self._body_read and (long or status in (408, 413))
        discard = close and status != 408
        if close:
            out.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": out})
        await self._send({"type": "http.response.body", "body": body, "more_body": discard})
        if discard:
            await self._discard()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, error: ApiError) -> None:
        await self.answer(error.status, error.body(), error.headers)

    async def start_stream(self, message: MutableMapping[str, Any]) -> None:
        """`send` for a streamed answer."""
        if not self.started:
            self.started = True
            self._metrics.count(message["status"])
        await self._send(message)

    async def _discard(self) -> None:
        left, deadline = DISCARD_BYTES, time.monotonic() + DISCARD_SECONDS
        try:
            while left > 0 and time.monotonic() < deadline:
                async with asyncio.timeout(DISCARD_IDLE_SECONDS):
                    event = await self.receive()
                if event["type"] == "http.disconnect" or not event.get("more_body", False):
                    return
                left -= len(event["body"])
        except TimeoutError:
            return


def _too_large(limit: int) -> ApiError:
    return ApiError(413, INVALID, "request_too_large", None, f"the body is larger than {limit} bytes")
