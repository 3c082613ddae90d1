"""A linear map, stored as each device multiplies it fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

FEW_ROWS = 16  # up to which `kernels.small_batch` is used


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights are laid out for the processor's bf16 instructions ahead of time.

    Without it oneDNN lays a weight out anew in each call, which costs a decode step more than the product itself.
    """
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # torch does not type it
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Linear:
    """weight [out, in] and, where the model has one, bias [out]. `pack` ends the time in which weights may be set."""

    __slots__ = ("_few", "_packed", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None
        self._few: Callable[..., torch.Tensor] | None = None  # multiplies few rows, where it is faster

    def parts(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Views of output rows [first, end). RuntimeError once packed."""
        if self.weight is None:
            raise RuntimeError("a packed weight has no rows to set")
        return self.weight[first:end], None if self.bias is None else self.bias[first:end]

    def pack(self, share: bool = False) -> None:
        """Lays the weight out for the processor; the plain one is let go unless it is shared with another use."""
        if self.weight is not None and packs(self.weight.device, self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)
            self.weight = self.weight if share else None
        elif self.weight is not None and self.weight.is_cuda and self.weight.dtype is torch.bfloat16:
            from engine_proc.kernels import small_batch  # noqa: PLC0415  needs Triton, which only torch for CUDA brings

            self._few = small_batch.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        if self._packed is not None:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        assert self.weight is not None
        if self._few is not None and x.shape[0] <= FEW_ROWS:
            return self._few(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] → fp32 [T, out], not rounded on the way where the sums are made in fp32; without bias."""
        if self.weight is not None and self.weight.is_cuda and self.weight.dtype is torch.bfloat16:
            if out is None:
                out = torch.empty(x.shape[0], self.weight.shape[0], dtype=torch.float32, device=x.device)
            if self._few is not None and x.shape[0] <= FEW_ROWS:
                return self._few(x, self.weight, None, out)
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
        result = self(x).float()
        return result if out is None else out.copy_(result)
