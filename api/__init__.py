"""The request parser: bytes of a body in, a checked `Generate` or an `ApiError` out. Same code in two processes."""

from api.errors import ApiError
from api.request import adopt, parse, parse_chat, parse_completions

__all__ = ["ApiError", "adopt", "parse", "parse_chat", "parse_completions"]
