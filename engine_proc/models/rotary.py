"""What a model wants done to its projected heads before attention: norm and rotation of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine_proc.models import rope


@dataclass(slots=True)
class Rotary:
    """Of one layer and step. cos [T, 1, D] (both halves) and sin [T, 1, D/2] as `rope.rotation` makes them."""

    cos: torch.Tensor
    sin: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor] | None  # [D], of an RMSNorm per head of q and of k
    eps: float

    def apply(self, qkv: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv [T, heads + 2 * kv_heads, D] → q, k, v, of which q and k are new."""
        both = heads + kv_heads
        if self.weights is None:
            qk = rope.rotate(qkv[:, :both], self.cos, self.sin)
            return qk[:, :heads], qk[:, heads:], qkv[:, both:]
        size = (qkv.shape[-1],)
        q = F.rms_norm(qkv[:, :heads], size, self.weights[0], self.eps)
        k = F.rms_norm(qkv[:, heads:both], size, self.weights[1], self.eps)
        return rope.rotate(q, self.cos, self.sin), rope.rotate(k, self.cos, self.sin), qkv[:, both:]
