"""Decode attention over blocks: one query token per row, its context found through the row's block table.

The queries that share a KV head are attended together, so K and V are read once. A context is cut into as many pieces
as keep the device busy (`splits`); each program attends over one piece and leaves an unnormalised sum with its
logarithmic weight, and a second kernel joins the pieces (the "split KV" of FlashDecoding, Dao et al. 2023). One piece
needs no second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_proc.models.base import AttentionShape

_TOKENS = 64  # of context per turn of a program's loop
_LEAST_QUERIES = 16  # rows that a matrix product takes
_MOST_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 4
_LOG2E = 1.4426950408889634


@triton.jit
def _store(
    k,
    v,
    cache,
    tables,
    slots,
    positions,
    stride,
    width,
    value_offset,
    block_tokens,
    block: tl.constexpr,
    size: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position < 0:  # a row that only fills the batch
        return
    slot = tl.load(slots + token)
    number = tl.load(tables + slot * width + position // block_tokens).to(tl.int64)
    place = cache + (number * block_tokens + position % block_tokens) * size
    channels = tl.arange(0, block)
    inside = channels < size
    tl.store(place + channels, tl.load(k + token * stride + channels, mask=inside), mask=inside)
    tl.store(place + value_offset + channels, tl.load(v + token * stride + channels, mask=inside), mask=inside)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Writes k and v [T, kv_heads, D] (rows of one stride) of the tokens at `positions` of `slots` to their blocks.

    cache: one layer's, [2, num_blocks, block_tokens, kv_heads, D]. tables int32 [slots, width]. Position -1: nothing.
    """
    size = k.shape[1] * k.shape[2]
    block = triton.next_power_of_2(size)
    _store[(len(k),)](
        k,
        v,
        cache,
        tables,
        slots,
        positions,
        k.stride(0),
        tables.stride(0),
        cache.stride(0),
        cache.shape[2],
        block,
        size,
        num_warps=max(1, min(8, block // 256)),
    )


@triton.jit
def _attend(
    q,
    keys,
    values,
    tables,
    slots,
    positions,
    out,
    partial,
    weights,
    scale,
    q_stride,
    width,
    block_tokens,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    queries: tl.constexpr,
    size: tl.constexpr,
    channels_block: tl.constexpr,
    tokens: tl.constexpr,
    splits: tl.constexpr,
    precision: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    piece = tl.cdiv(tl.cdiv(length, splits), tokens) * tokens
    first = split * piece
    end = tl.minimum(first + piece, length)
    query = tl.arange(0, queries)
    channel = tl.arange(0, channels_block)
    heads = kv_heads * group
    wanted = (query < group)[:, None] & (channel < size)[None, :]
    head = kv_head * group + query
    if first >= end:
        if splits == 1:  # a row that only fills the batch: what it leaves must be finite
            tl.store(
                out + (row * heads + head[:, None]) * size + channel[None, :],
                tl.zeros([queries, channels_block], tl.float32),
                mask=wanted,
            )
        return
    table = tables + tl.load(slots + row) * width
    asked = tl.load(q + row * q_stride + head[:, None] * size + channel[None, :], mask=wanted, other=0.0)
    best = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    sums = tl.zeros([queries, channels_block], tl.float32)
    offset = tl.arange(0, tokens)
    for start in range(first, end, tokens):
        token = start + offset
        there = token < end
        number = tl.load(table + token // block_tokens, mask=there, other=0).to(tl.int64)
        place = ((number * block_tokens + token % block_tokens) * kv_heads + kv_head) * size
        readable = there[:, None] & (channel < size)[None, :]
        k = tl.load(keys + place[:, None] + channel[None, :], mask=readable, other=0.0)
        score = tl.dot(asked, tl.trans(k), input_precision=precision) * scale
        score = tl.where(there[None, :], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        share = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(best - higher)
        v = tl.load(values + place[:, None] + channel[None, :], mask=readable, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(share.to(v.dtype), v, input_precision=precision)
        total = total * shrink + tl.sum(share, axis=1)
        best = higher
    if splits == 1:
        tl.store(out + (row * heads + head[:, None]) * size + channel[None, :], sums / total[:, None], mask=wanted)
    else:
        place = (row * heads + head) * splits + split
        tl.store(partial + place[:, None] * size + channel[None, :], sums / total[:, None], mask=wanted)
        tl.store(weights + place, best + tl.log2(total), mask=query < group)


@triton.jit
def _join(
    partial,
    weights,
    positions,
    out,
    size: tl.constexpr,
    channels_block: tl.constexpr,
    tokens: tl.constexpr,
    splits: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = row * tl.num_programs(1) + tl.program_id(1)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    piece = tl.cdiv(tl.cdiv(length, splits), tokens) * tokens
    split = tl.arange(0, splits)
    channel = tl.arange(0, channels_block)
    there = split * piece < length
    weight = tl.load(weights + place * splits + split, mask=there, other=float("-inf"))
    share = tl.where(there, tl.exp2(weight - tl.max(weight)), 0.0)
    parts = tl.load(
        partial + (place * splits + split[:, None]) * size + channel[None, :],
        mask=there[:, None] & (channel < size)[None, :],
        other=0.0,
    )
    total = tl.maximum(tl.sum(share), 1e-30)  # 0 in a row that only fills the batch
    tl.store(out + place * size + channel, tl.sum(parts * share[:, None], axis=0) / total, mask=channel < size)


def splits_for(rows: int, kv_heads: int, processors: int) -> int:
    """Pieces per context, a power of 2: enough programs to fill the device, whatever the contexts are."""
    wanted = processors * _PROGRAMS_PER_PROCESSOR // (rows * kv_heads)
    return min(_MOST_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    shape: AttentionShape,
    splits: int,
) -> torch.Tensor:
    """q [R, heads, D] at `positions` (int64 [R]) of `slots` (int64 [R]) → [R, heads * D] over positions [0, position].

    cache: one layer's, [2, num_blocks, block_tokens, kv_heads, D]. tables int32 [slots, width].
    """
    rows = q.shape[0]
    size = shape.head_dim
    out = torch.empty(rows, shape.heads * size, dtype=q.dtype, device=q.device)
    group = shape.heads // shape.kv_heads
    partial, weights = out, out
    if splits > 1:
        partial = torch.empty(rows, shape.heads, splits, size, dtype=torch.float32, device=q.device)
        weights = torch.empty(rows, shape.heads, splits, dtype=torch.float32, device=q.device)
    channels = triton.next_power_of_2(size)
    _attend[(rows, shape.kv_heads, splits)](
        q,
        cache[0],
        cache[1],
        tables,
        slots,
        positions,
        out,
        partial,
        weights,
        shape.scale * _LOG2E,
        q.stride(0),
        tables.stride(0),
        shape.block_tokens,
        shape.kv_heads,
        group,
        max(_LEAST_QUERIES, triton.next_power_of_2(group)),
        size,
        channels,
        _TOKENS,
        splits,
        "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3 if q.dtype != torch.float32 else 1,
    )
    if splits > 1:
        _join[(rows, shape.heads)](partial, weights, positions, out, size, channels, _TOKENS, splits, num_warps=4)
    return out
