"""The interface of attention backends: what the runner asks of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from engine_proc.batch import Batch, Numbers
from engine_proc.models.base import AttentionShape, LayerAttention
from engine_proc.upload import Upload


@dataclass(frozen=True, slots=True)
class Room:
    """What a backend makes room for."""

    shape: AttentionShape
    num_blocks: int
    max_running: int
    context_length: int  # the model's


class AttentionBackend(Protocol):
    """Owns the blocks of one engine and attends over them. Nothing here waits for the device."""

    @property
    def cache(self) -> torch.Tensor:
        """[layers, 2 (K, V), num_blocks, block_tokens, kv_heads, head_dim]: one record per layer, block and K or V."""
        ...

    def open_slot(self, slot: int) -> None:
        """Another sequence has the slot from now on."""
        ...

    def prepare(self, batch: Batch, upload: Upload) -> LayerAttention:
        """Plans one step, whose tokens lie in the order of the rows.

        What the device needs is added to `upload`; the result may be called once that has been sent.
        """
        ...


@runtime_checkable
class Capturable(Protocol):
    """A backend whose decode steps read only device memory that stays where it is."""

    @property
    def spare_place(self) -> int:
        """A place in the table that nobody reads."""
        ...

    def append(self, batch: Batch) -> tuple[Numbers, Numbers]:
        """The blocks of the batch that the device's table does not have yet: int64 [n] places in it, and blocks."""
        ...

    def write_tables(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Enqueues what `append` found, ahead of the step. int64 [n] each."""
        ...

    @property
    def tile_tokens(self) -> int:
        """How many tokens a tile may have."""
        ...

    def rows(self, slots: torch.Tensor, positions: torch.Tensor, tiles: torch.Tensor | None) -> LayerAttention:
        """Attention of tokens at int64 [T] positions of slots; one at position -1 only fills the batch.

        tiles int64 [2, N]: first token and number of runs of tokens that follow each other; None: decode rows alone.
        """
        ...


def new_cache(shape: AttentionShape, num_blocks: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The memory of all blocks. Zeros: attention reads whole blocks, and masked garbage could be NaN."""
    size = (shape.layers, 2, num_blocks, shape.block_tokens, shape.kv_heads, shape.head_dim)
    if device.type == "cpu":  # zero pages come from the kernel as they are touched: gigabytes need no time at the start
        count = math.prod(size) * dtype.itemsize
        return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(size)
    return torch.zeros(size, dtype=dtype, device=device)
