"""A linear map, stored as each device multiplies it fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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

    __slots__ = ("_packed", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None

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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        if self._packed is not None:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)
