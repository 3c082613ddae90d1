"""The small operations between a layer's matrix products, each as one kernel that reads and writes its data once.

All compute in fp32 and round once, when they store; only a residual sum is rounded before its norm is taken, since the
next layer reads it as stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_proc.kernels import overlap as launch

_COLUMNS = 1024  # per program of `_silu_mul`


@triton.jit
def _add_rms_norm(
    x, y, out, weight, eps, width: tl.constexpr, block: tl.constexpr, has_y: tl.constexpr, overlap: tl.constexpr
):
    if overlap:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    value = tl.load(x + row * width + columns, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    if has_y:
        wide += tl.load(y + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        value = wide.to(value.dtype)
        tl.store(x + row * width + columns, value, mask=inside)
        wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, wide * scale * factor, mask=inside)


def add_rms_norm(x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] += y [T, H] in place (if there is a y), then RMSNorm(x) * weight → [T, H]; contiguous."""
    out = torch.empty_like(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // 512))
    more = launch.options(x.device)
    _add_rms_norm[(rows,)](
        x, x if y is None else y, out, weight, eps, width, block, y is not None, num_warps=warps, **more
    )
    return out


@triton.jit
def _silu_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr):
    if overlap:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, gate * tl.sigmoid(gate) * up, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], contiguous → silu(gate) * up [T, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, _COLUMNS))
    _silu_mul[grid](gate_up, out, width, _COLUMNS, num_warps=4, **launch.options(out.device))
    return out
