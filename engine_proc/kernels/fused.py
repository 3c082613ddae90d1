"""The small operations between a layer's matrix products, each as one kernel that reads and writes its data once.

All compute in fp32 and round once, when they store; only a residual sum is rounded before its norm is taken, since the
next layer reads it as stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS = 8  # heads per program of `_norm_rotate`
_COLUMNS = 1024  # per program of `_silu_mul`


@triton.jit
def _add_rms_norm(x, y, out, weight, eps, width: tl.constexpr, block: tl.constexpr, has_y: tl.constexpr):
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
    _add_rms_norm[(rows,)](x, x if y is None else y, out, weight, eps, width, block, y is not None, num_warps=warps)
    return out


@triton.jit
def _norm_rotate(
    qk,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    stride,
    q_heads: tl.constexpr,
    heads: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
    per_program: tl.constexpr,
    normed: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * per_program + tl.arange(0, per_program)[:, None]
    channel = tl.arange(0, block)[None, :]
    inside = (head < heads) & (channel < half)
    first = qk + token * stride + head * (2 * half) + channel
    low = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    if normed:
        total = tl.sum(low * low, axis=1, keep_dims=True) + tl.sum(high * high, axis=1, keep_dims=True)
        scale = tl.rsqrt(total / (2 * half) + eps)
        is_q = inside & (head < q_heads)
        is_k = inside & (head >= q_heads)
        low *= scale * (
            tl.load(q_weight + channel + 0 * head, mask=is_q, other=0.0).to(tl.float32)
            + tl.load(k_weight + channel + 0 * head, mask=is_k, other=0.0).to(tl.float32)
        )
        high *= scale * (
            tl.load(q_weight + half + channel + 0 * head, mask=is_q, other=0.0).to(tl.float32)
            + tl.load(k_weight + half + channel + 0 * head, mask=is_k, other=0.0).to(tl.float32)
        )
    c = tl.load(cos + token * (2 * half) + channel, mask=channel < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + channel, mask=channel < half, other=0.0).to(tl.float32)
    tl.store(first, low * c - high * s, mask=inside)
    tl.store(first + half, high * c + low * s, mask=inside)


def norm_rotate(
    qk: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_heads: int,
    eps: float,
) -> None:
    """In place on qk [T, heads, D], of which the first q_heads are queries: RMSNorm per head (if weighted), rotation.

    cos [T, 1, D] (both halves) and sin [T, 1, D/2] are those of `rope.rotation`. qk may be a view of wider rows.
    """
    tokens, heads, size = qk.shape
    half = size // 2
    grid = (tokens, triton.cdiv(heads, _HEADS))
    normed = q_weight is not None and k_weight is not None
    weights = (q_weight, k_weight) if normed else (cos, cos)
    block = triton.next_power_of_2(half)
    _norm_rotate[grid](
        qk, cos, sin, *weights, eps, qk.stride(0), q_heads, heads, half, block, _HEADS, normed, num_warps=2
    )


@triton.jit
def _silu_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr):
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
    _silu_mul[(rows, triton.cdiv(width, _COLUMNS))](gate_up, out, width, _COLUMNS, num_warps=4)
    return out
