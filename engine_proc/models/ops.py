"""The small operations of a model between its matrix products: in torch, or fused in kernels of our own on CUDA."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F

_MANY_ROWS = 64  # from which on an RMSNorm's passes over memory cost more than its calls


class Ops(Protocol):
    """What models call. T tokens, H hidden, I intermediate width."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of x [T, H] → [T, H]."""
        ...

    def add_norm(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + y, its RMSNorm), [T, H] each; the memory of x may be used."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2I] → silu(gate) * up [T, I]."""
        ...


class TorchOps:
    """See `Ops`; on every device."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_norm(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + y
        return x, self.norm(x, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class CpuOps(TorchOps):
    """See `Ops`; on the CPU, where torch's own RMSNorm goes over many rows six times instead of three."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.shape[0] < _MANY_ROWS:
            return super().norm(x, weight, eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        # sqrt(mean of squares + eps), as the hypotenuse over the root mean square and the root of eps
        scale = torch.hypot(length.mul_(x.shape[-1] ** -0.5), length.new_tensor(math.sqrt(eps)))
        return torch.div(x, scale).mul_(weight).to(x.dtype)


class FusedOps:
    """See `Ops`; each one kernel, on CUDA with Triton."""

    def __init__(self) -> None:
        from engine_proc.kernels import fused  # noqa: PLC0415  needs Triton, which only torch for CUDA brings

        self._fused = fused

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._fused.add_rms_norm(x, None, weight, eps)

    def add_norm(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self._fused.add_rms_norm(x, y, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._fused.silu_mul(gate_up)


def ops_for(device: torch.device) -> Ops:
    """The fastest for `device`."""
    if device.type == "cuda":
        return FusedOps()
    return CpuOps() if device.type == "cpu" else TorchOps()
