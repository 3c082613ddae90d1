"""Requests and ranks for the placement tests: chains of block keys, a placement with ready ranks, one dispatch."""

from __future__ import annotations

import hashlib
from typing import Any

from router_proc.placement import Choice, Placement, Share, Wanted

BLOCK = 128


def chain(seed: int, blocks: int, parent: bytes = b"") -> bytes:
    """Keys of a chain of blocks that only this seed has."""
    found, key = [], parent
    for number in range(blocks):
        key = hashlib.sha256(key + seed.to_bytes(8, "little") + bytes([number & 255])).digest()
        found.append(key)
    return b"".join(found)


def placement(ranks: int = 2, routing: str = "affinity", slack: int = 8192, keep: int = 1) -> Placement:
    found = Placement(ranks, routing, slack)
    for rank in range(ranks):
        found.ready(rank, 100 + rank, BLOCK, keep, 65_536)
    return found


def wanted(tokens: int = 40, max_tokens: int = 100, keys: bytes = b"", tenant: str = "", **fields: Any) -> Wanted:
    return Wanted(tenant, keys, tokens, max_tokens, **fields)


def place(found: Placement, request: Wanted) -> tuple[Choice, list[Share]]:
    choice = found.choose(request)
    assert choice is not None
    return choice, found.dispatched(request, choice)
