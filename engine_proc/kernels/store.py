"""The way of the projected heads to attention, in one kernel: norm and rotation, and K and V into their blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_proc.kernels import overlap as launch
from engine_proc.models.base import AttentionShape
from engine_proc.models.rotary import Rotary

_HEADS = 8  # per program


@triton.jit
def _prepare(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    cache,
    tables,
    slots,
    positions,
    width,
    value_offset,
    block_tokens,
    q_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
    per_program: tl.constexpr,
    normed: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * per_program + tl.arange(0, per_program)[:, None]
    channel = tl.arange(0, block)[None, :]
    rotated: tl.constexpr = q_heads + kv_heads
    inside = (head < rotated + kv_heads) & (channel < half)
    place = qkv + token * ((rotated + kv_heads) * 2 * half) + head * (2 * half) + channel
    stored_low = tl.load(place, mask=inside, other=0.0)
    stored_high = tl.load(place + half, mask=inside, other=0.0)
    low = stored_low.to(tl.float32)
    high = stored_high.to(tl.float32)
    if normed:
        total = tl.sum(low * low, axis=1, keep_dims=True) + tl.sum(high * high, axis=1, keep_dims=True)
        scale = tl.rsqrt(total / (2 * half) + eps)
        is_q = inside & (head < q_heads)
        is_k = inside & (head >= q_heads)
        q_place = q_weight + channel + 0 * head
        k_place = k_weight + channel + 0 * head
        low *= scale * (
            tl.load(q_place, mask=is_q, other=0.0).to(tl.float32)
            + tl.load(k_place, mask=is_k, other=0.0).to(tl.float32)
        )
        high *= scale * (
            tl.load(q_place + half, mask=is_q, other=0.0).to(tl.float32)
            + tl.load(k_place + half, mask=is_k, other=0.0).to(tl.float32)
        )
    c = tl.load(cos + token * (2 * half) + channel, mask=channel < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + channel, mask=channel < half, other=0.0).to(tl.float32)
    is_v = head >= rotated
    new_low = tl.where(is_v, stored_low, (low * c - high * s).to(stored_low.dtype))
    new_high = tl.where(is_v, stored_high, (high * c + low * s).to(stored_low.dtype))
    tl.store(place, new_low, mask=inside & (head < rotated))
    tl.store(place + half, new_high, mask=inside & (head < rotated))
    position = tl.load(positions + token)
    kept = inside & (head >= q_heads) & (position >= 0)  # -1: a token that only fills the batch
    at = tl.maximum(position, 0)
    number = tl.load(tables + tl.load(slots + token) * width + at // block_tokens).to(tl.int64)
    kv_head = tl.where(is_v, head - rotated, head - q_heads)
    kv_place = cache + ((number * block_tokens + at % block_tokens) * kv_heads + kv_head) * (2 * half) + channel
    kv_place += tl.where(is_v, value_offset, 0)
    tl.store(kv_place, new_low, mask=kept)
    tl.store(kv_place + half, new_high, mask=kept)


def prepare(
    qkv: torch.Tensor,
    rotary: Rotary,
    shape: AttentionShape,
    cache: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """In place on qkv [T, heads + 2 * kv_heads, D], contiguous: norm and rotation of queries and keys.

    K and V also go to the blocks of the tokens at `positions` (int64 [T]) of `slots`; position -1 goes nowhere.
    cache: one layer's, [2, num_blocks, block_tokens, kv_heads, D]. tables int32 [slots, width].
    """
    half = shape.head_dim // 2
    weights = rotary.weights or (rotary.cos, rotary.cos)
    heads = shape.heads + 2 * shape.kv_heads
    _prepare[(len(qkv), triton.cdiv(heads, _HEADS))](
        qkv,
        rotary.cos,
        rotary.sin,
        *weights,
        rotary.eps,
        cache,
        tables,
        slots,
        positions,
        tables.stride(0),
        cache.stride(0),
        shape.block_tokens,
        shape.heads,
        shape.kv_heads,
        half,
        triton.next_power_of_2(half),
        _HEADS,
        rotary.weights is not None,
        num_warps=2,
        **launch.options(qkv.device),
    )
