"""Configuration of the router process."""

from __future__ import annotations

import msgspec


class RouterConfig(msgspec.Struct):
    """Made once by the launcher from its flags."""

    run_dir: str
    secret: bytes
    ranks: int
    tokenizers: int
    frontends: int
    routing: str = "affinity"  # "affinity" | "least-loaded"
    affinity_slack_tokens: int = 8192
    max_queued_requests: int = 4096  # sequences placed but not yet running, over all ranks; see router_proc.admission
    max_queued_tokens: int = 0  # 0 = unlimited
    engine_silence_seconds: float = 10.0
    test_hooks: bool = False
