"""The error of the HTTP contract: one exception type, its JSON bytes, and the fixed texts of server errors."""

from __future__ import annotations

import msgspec

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
MAX_RETRY_SECONDS = 60

INVALID = "invalid_request_error"
SERVER = "server_error"

# In-band codes and codes of failures inside the service: status, message. Nothing of the cause goes to a client.
FAILURES = {
    "internal_error": (500, "internal error"),
    "engine_unavailable": (503, "the service cannot run this request now; try again"),
    "shutting_down": (503, "the service is shutting down; try again"),
    "kvnet_incompatible": (503, "prefill and decode sides do not fit together"),
    "request_aborted": (503, "the request was aborted by the service"),
    "request_timeout": (504, "the request's own deadline has passed"),
}


class ErrorFields(msgspec.Struct):
    """The inner object of an error body; field order is the order in JSON."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """`{"error": {...}}`."""

    error: ErrorFields


class ApiError(Exception):
    """A refusal as the client sees it. `message` never holds any of the client's input."""

    def __init__(
        self,
        status: int,
        type: str,
        code: str | None,
        param: str | None,
        message: str,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.code = status, type, code
        self.param = None if param is None else param[:MAX_PARAM_CHARS]
        self.message = message[:MAX_MESSAGE_CHARS]
        self.headers = headers or []

    def body(self) -> bytes:
        """The JSON error object: at most 4 KiB, one line."""
        return msgspec.json.encode(ErrorBody(ErrorFields(self.message, self.type, self.param, self.code)))


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """400: the caller's fault, at the field `param`."""
    return ApiError(400, INVALID, code, param, message)


def unsupported(param: str, message: str = "") -> ApiError:
    """400: a field that is known and not supported."""
    return invalid(param, message or f"{param} is not supported", "unsupported_parameter")


def retry_after(seconds: int) -> list[tuple[bytes, bytes]]:
    """The `Retry-After` header: an integer from 1 to 60."""
    return [(b"retry-after", str(min(MAX_RETRY_SECONDS, max(1, seconds))).encode())]


def failure(code: str, seconds: int = 1) -> ApiError:
    """A failure inside the service, by its code (an unknown code is an internal error)."""
    status, message = FAILURES.get(code, FAILURES["internal_error"])
    if code not in FAILURES:
        code = "internal_error"
    return ApiError(status, SERVER, code, None, message, retry_after(seconds) if status == 503 else None)
