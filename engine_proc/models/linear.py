"""A linear map, stored as each device multiplies it fastest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

FEW_ROWS = 16  # up to which `kernels.small_batch` is used
_PACKED_FOR_ROWS = 512  # the blocking for many rows is as fast for few; that for few is slow for many


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


@cache
def packs_fp32() -> bool:
    """Whether MKL lays fp32 weights out ahead of time, and multiplies one layout with any number of rows.

    It promises that for the number of rows that the layout was made for only, so it is tried once, on small numbers.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]  # torch does not type it
        return False
    weight = (torch.arange(96 * 160, dtype=torch.float32).remainder_(7) - 3).view(96, 160)
    packed = _packed_fp32(weight)
    for rows in (1, 2, 3, 8, 33, 600):
        x = (torch.arange(rows * 160, dtype=torch.float32).remainder_(5) - 2).view(rows, 160)
        if not torch.equal(_multiply_fp32(x, packed, _shape_of(weight), None), F.linear(x, weight)):
            return False  # whole numbers: the order of the sums does not matter
    return True


def _packed_fp32(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _shape_of(weight: torch.Tensor) -> torch.Tensor:
    """A tensor of the weight's shape without its memory: the packed product asks for no more of the plain one."""
    return weight.new_zeros(1, 1).expand(weight.shape)


def _multiply_fp32(
    x: torch.Tensor, packed: torch.Tensor, shape: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # The last argument is compared with x's rows; with another number the plain weight would be multiplied.
    out: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, shape, bias, x.shape[0])
    return out


class Linear:
    """weight [out, in] and, where the model has one, bias [out]. `pack` ends the time in which weights may be set."""

    __slots__ = ("_few", "_packed", "_shape", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None
        self._shape: torch.Tensor | None = None  # where the packed weight is in fp32
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
        elif self.weight is not None and self.weight.is_cpu and self.weight.dtype is torch.float32 and packs_fp32():
            self._packed, self._shape = _packed_fp32(self.weight), _shape_of(self.weight)
            self.weight = self.weight if share else None
        elif self.weight is not None and self.weight.is_cuda and self.weight.dtype is torch.bfloat16:
            from engine_proc.kernels import small_batch  # noqa: PLC0415  needs Triton, which only torch for CUDA brings

            self._few = small_batch.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        if self._packed is not None and self._shape is not None:
            return _multiply_fp32(x, self._packed, self._shape, self.bias)
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
