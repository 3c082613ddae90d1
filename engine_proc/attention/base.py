"""The interface of attention backends: what the runner asks of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from engine_proc.models.base import AttentionShape, LayerAttention
from engine_proc.plan import Row
from engine_proc.upload import Upload


class AttentionBackend(Protocol):
    """Owns the blocks of one engine and attends over them. Nothing here waits for the device."""

    @property
    def cache(self) -> torch.Tensor:
        """[layers, 2 (K, V), num_blocks, block_tokens, kv_heads, head_dim]: one record per layer, block and K or V."""
        ...

    def prepare(self, rows: Sequence[Row], upload: Upload) -> LayerAttention:
        """Plans one step. `rows`: decode rows by rising context length, then prefill rows; their tokens in this order.

        What the device needs is added to `upload`; the result may be called once that has been sent.
        """
        ...


def new_cache(shape: AttentionShape, num_blocks: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The memory of all blocks. Zeros: attention reads whole blocks, and masked garbage could be NaN."""
    size = (shape.layers, 2, num_blocks, shape.block_tokens, shape.kv_heads, shape.head_dim)
    if device.type == "cpu":  # zero pages come from the kernel as they are touched: gigabytes need no time at the start
        count = math.prod(size) * dtype.itemsize
        return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(size)
    return torch.zeros(size, dtype=dtype, device=device)
