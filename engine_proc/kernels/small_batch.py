"""Matrix products of a few rows, which read the weights once at the speed of the memory.

The libraries' kernels for such shapes reach about three quarters of it. Which form a product takes depends on its
shapes alone, so equal steps give equal bits in every process.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_proc.kernels import overlap as launch

_LEAST_ROWS = 16  # that a matrix product takes


@triton.jit
def _one_row(
    x,
    weight,
    bias,
    out,
    outputs,
    width: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    biased: tl.constexpr,
    overlap: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    there = row < outputs
    place = weight + row[:, None] * width + column[None, :]
    inside = column < width
    part = tl.load(place, mask=there[:, None] & inside[None, :], other=0.0)
    if overlap:  # weights never change: they are on their way while x is still being computed
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    sums = part.to(tl.float32) * values[None, :]
    for start in range(block, width, block):
        inside = start + column < width
        values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        part = tl.load(place + start, mask=there[:, None] & inside[None, :], other=0.0)
        sums += part.to(tl.float32) * values[None, :]
    total = tl.sum(sums, axis=1)
    if biased:
        total += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, total, mask=there)


@triton.jit
def _few_rows(
    x,
    weight,
    bias,
    out,
    count,
    outputs,
    width: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    biased: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    token = tl.arange(0, tokens)
    there = row < outputs
    given = token < count
    sums = tl.zeros([rows, tokens], tl.float32)
    for start in range(0, width, block):
        inside = start + column < width
        values = tl.load(
            x + token[:, None] * width + start + column[None, :], mask=given[:, None] & inside[None, :], other=0.0
        )
        part = tl.load(
            weight + row[:, None] * width + start + column[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        sums = tl.dot(part, tl.trans(values), sums)
    if biased:
        sums += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[:, None]
    tl.store(out + token[None, :] * outputs + row[:, None], sums, mask=given[None, :] & there[:, None])


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x bf16 [T, in], T at most 64, weight bf16 [out, in], bias [out] → [T, out], or what `out` holds and its dtype."""
    count, width = x.shape
    outputs = weight.shape[0]
    if out is None:
        out = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    place = weight if bias is None else bias
    more = launch.options(x.device)
    if count == 1:
        rows, block = 1, min(4096, triton.next_power_of_2(width))
        grid = (outputs,)
        _one_row[grid](
            x, weight, place, out, outputs, width, rows, block, bias is not None, num_warps=4, num_stages=3, **more
        )
        return out
    rows, block, warps, stages = (16, 256, 2, 4) if outputs <= 8192 else (64, 128, 4, 4)
    grid = (triton.cdiv(outputs, rows),)
    block = min(block, max(16, triton.next_power_of_2(width)))
    _few_rows[grid](
        x,
        weight,
        place,
        out,
        count,
        outputs,
        width,
        max(_LEAST_ROWS, triton.next_power_of_2(count)),
        rows,
        block,
        bias is not None,
        num_warps=warps,
        num_stages=stages,
        **more,
    )
    return out
