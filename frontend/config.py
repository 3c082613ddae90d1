"""Configuration of a frontend process."""

from __future__ import annotations

import msgspec

from wire.limits import Limits


class FrontendConfig(msgspec.Struct):
    """Made once by the launcher from its flags. `listen_fd` is the bound, listening HTTP socket."""

    run_dir: str  # private folder with router.sock and tokenizer.N.sock
    secret: bytes
    listen_fd: int
    host: str
    port: int
    served_models: list[str]
    created: int  # Unix seconds, the same in all frontends
    tokenizers: int
    frontends: int
    limits: Limits
    api_keys: dict[str, str] = {}  # key -> tenant; empty = open
    test_hooks: bool = False
    keepalive_seconds: float = 330.0
    header_timeout_seconds: float = 20.0
    body_timeout_seconds: float = 60.0
    send_stall_seconds: float = 60.0
    comment_seconds: float = 15.0
