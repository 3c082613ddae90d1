"""What a model declares about the state it keeps per token: all that blocks, host cache and transfers may know of it.

Imports no torch: the mock engine declares a cache too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Sizes in bytes of the records that a model keeps, and the rules for reusing them.

    block_record_bytes: of one block, one entry per layer (0 = the layer keeps no blocks).
    window_record_bytes: of one window block, one entry per layer (empty = the model has no sliding-window layers).
    tail_bytes: of one state's tail (0 = none). window: tokens that a window layer sees (0 = no such layer).
    keep_tokens: prompt tokens that are recomputed at least, 0 = trim and prefix cache off.
    final_pass: a prompt ends with one more pass over its last rows.
    cache_format: names dtype and layout of the records; part of the root, so that other formats never share a key.
    """

    layers: int
    block_tokens: int
    block_record_bytes: tuple[int, ...]
    cache_format: str
    keep_tokens: int = 1
    window_record_bytes: tuple[int, ...] = ()
    window: int = 0
    tail_bytes: int = 0
    final_pass: bool = False

    def __post_init__(self) -> None:
        if len(self.block_record_bytes) != self.layers:
            raise ValueError(f"{self.layers} layers but {len(self.block_record_bytes)} block records")
        if self.window_record_bytes and len(self.window_record_bytes) != self.layers:
            raise ValueError(f"{self.layers} layers but {len(self.window_record_bytes)} window records")

    def block_bytes(self) -> int:
        """One block, all layers."""
        return sum(self.block_record_bytes)

    def window_block_bytes(self) -> int:
        """One window block, all layers."""
        return sum(self.window_record_bytes)

    def window_blocks(self) -> int:
        """Window blocks that a state holds: those that the next row may still see."""
        return -(-(self.window - 1) // self.block_tokens) if self.window else 0
