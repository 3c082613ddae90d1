"""Which attention backends exist."""

from __future__ import annotations

import torch

from engine_proc.attention.base import AttentionBackend
from engine_proc.attention.sdpa import SdpaBackend
from engine_proc.models.base import AttentionShape

BACKENDS = {"sdpa": SdpaBackend}


def make_backend(
    name: str, shape: AttentionShape, num_blocks: int, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """ValueError names an unknown backend and those that exist."""
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; accepted are {', '.join(BACKENDS)}")
    return BACKENDS[name](shape, num_blocks, device, dtype)
