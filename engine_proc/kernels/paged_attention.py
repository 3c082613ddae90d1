"""Attention over blocks: each query token finds its context through its sequence's block table.

The queries that share a KV head are attended together, those of a decode row, or of a short run of tokens of one
sequence (a tile), so K and V are read once for all of them. A context is cut into as many pieces
as keep the device busy (`splits`); each program attends over one piece and leaves an unnormalised sum with its
logarithmic weight, and a second kernel joins the pieces (the "split KV" of FlashDecoding, Dao et al. 2023). One piece
needs no second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine_proc.kernels import overlap as launch
from engine_proc.models.base import AttentionShape

_TOKENS = 64  # of context per turn of a program's loop
_LEAST_QUERIES = 16  # rows that a matrix product takes
_TILE_QUERIES = 64  # of one KV head in a tile of several tokens
_MOST_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 4
_LOG2E = 1.4426950408889634


@triton.jit
def _attend(
    q,
    keys,
    values,
    tables,
    slots,
    positions,
    tiles,
    out,
    partial,
    weights,
    scale,
    q_stride,
    width,
    block_tokens,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    queries: tl.constexpr,
    size: tl.constexpr,
    channels_block: tl.constexpr,
    tokens: tl.constexpr,
    splits: tl.constexpr,
    tiled: tl.constexpr,
    precision: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if tiled:
        token = tl.load(tiles + tile)
        count = tl.load(tiles + tl.num_programs(0) + tile)
    else:
        token = tile
        count = tl.full([], 1, tl.int64)
    if count == 0:
        return
    query = tl.arange(0, queries)
    ahead = query // group_block  # tokens of the tile before this one
    head = kv_head * group + query % group_block
    channel = tl.arange(0, channels_block)
    asked_for = (ahead < count) & (query % group_block < group)
    wanted = asked_for[:, None] & (channel < size)[None, :]
    place = (token + ahead) * (kv_heads * group) + head
    start_position = tl.load(positions + token)
    length = (start_position + count).to(tl.int32)  # 0 in a row that only fills the batch
    piece = tl.cdiv(tl.cdiv(length, splits), tokens) * tokens
    first = split * piece
    end = tl.minimum(first + piece, length)
    if first >= end:
        if splits == 1:
            zeros = tl.zeros([queries, channels_block], tl.float32)
            tl.store(out + place[:, None] * size + channel[None, :], zeros, mask=wanted)
        else:
            tl.store(weights + place * splits + split, tl.full([queries], float("-inf"), tl.float32), mask=asked_for)
        return
    table = tables + tl.load(slots + token) * width
    asked = tl.load(
        q + (token + ahead)[:, None] * q_stride + head[:, None] * size + channel[None, :], mask=wanted, other=0.0
    )
    best = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    sums = tl.zeros([queries, channels_block], tl.float32)
    offset = tl.arange(0, tokens)
    for start in range(first, end, tokens):
        position = start + offset
        there = position < end
        number = tl.load(table + position // block_tokens, mask=there, other=0).to(tl.int64)
        row = ((number * block_tokens + position % block_tokens) * kv_heads + kv_head) * size
        readable = there[:, None] & (channel < size)[None, :]
        k = tl.load(keys + row[:, None] + channel[None, :], mask=readable, other=0.0)
        score = tl.dot(asked, tl.trans(k), input_precision=precision) * scale
        seen = there[None, :] & (position[None, :] <= (start_position + ahead)[:, None])
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query may see nothing of this piece
        share = tl.exp2(score - base[:, None])
        shrink = tl.exp2(best - base)
        v = tl.load(values + row[:, None] + channel[None, :], mask=readable, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(share.to(v.dtype), v, input_precision=precision)
        total = total * shrink + tl.sum(share, axis=1)
        best = higher
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if splits == 1:
        tl.store(out + place[:, None] * size + channel[None, :], result, mask=wanted)
    else:
        place = place * splits + split
        tl.store(partial + place[:, None] * size + channel[None, :], result, mask=wanted)
        tl.store(weights + place, best + tl.log2(total), mask=asked_for)


@triton.jit
def _join(
    partial,
    weights,
    positions,
    out,
    size: tl.constexpr,
    channels_block: tl.constexpr,
    splits: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    place = token * tl.num_programs(1) + tl.program_id(1)
    channel = tl.arange(0, channels_block)
    if tl.load(positions + token) < 0:  # only fills the batch: what it leaves must be finite
        tl.store(out + place * size + channel, tl.zeros([channels_block], tl.float32), mask=channel < size)
        return
    split = tl.arange(0, splits)
    weight = tl.load(weights + place * splits + split)
    there = weight > float("-inf")
    share = tl.where(there, tl.exp2(weight - tl.max(weight)), 0.0)
    parts = tl.load(
        partial + (place * splits + split[:, None]) * size + channel[None, :],
        mask=there[:, None] & (channel < size)[None, :],
        other=0.0,
    )
    total = tl.sum(parts * share[:, None], axis=0) / tl.sum(share)
    tl.store(out + place * size + channel, total, mask=channel < size)


def tile_tokens(shape: AttentionShape) -> int:
    """How many tokens of one sequence a program attends for at once, where they follow each other."""
    return max(1, _TILE_QUERIES // int(triton.next_power_of_2(shape.heads // shape.kv_heads)))


def splits_for(tiles: int, kv_heads: int, processors: int) -> int:
    """Pieces per context, a power of 2: enough programs to fill the device, whatever the contexts are."""
    wanted = processors * _PROGRAMS_PER_PROCESSOR // (tiles * kv_heads)
    return min(_MOST_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    shape: AttentionShape,
    splits: int,
    tiles: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, heads, D] at `positions` (int64 [T]) of `slots` (int64 [T]) → [T, heads * D], each over [0, position].

    cache: one layer's, [2, num_blocks, block_tokens, kv_heads, D], with the K and V of these tokens. tables int32
    [slots, width]. tiles int64 [2, N]: first token and number (at most `tile_tokens`; 0 = unused) of runs of tokens
    that follow each other in one sequence; they hold each token once but those at position -1, whose rows mean
    nothing. Without tiles each token is one.
    """
    count, size = q.shape[0], shape.head_dim
    out = torch.empty(count, shape.heads * size, dtype=q.dtype, device=q.device)
    group = shape.heads // shape.kv_heads
    group_block = triton.next_power_of_2(group)
    partial, weights = out, out
    if splits > 1:
        partial = torch.empty(count, shape.heads, splits, size, dtype=torch.float32, device=q.device)
        weights = torch.empty(count, shape.heads, splits, dtype=torch.float32, device=q.device)
    elif tiles is not None:
        out.zero_()  # of tokens in no tile
    channels = triton.next_power_of_2(size)
    more = launch.options(q.device)
    in_tile = 1 if tiles is None else tile_tokens(shape)
    _attend[(count if tiles is None else tiles.shape[1], shape.kv_heads, splits)](
        q,
        cache[0],
        cache[1],
        tables,
        slots,
        positions,
        positions if tiles is None else tiles,
        out,
        partial,
        weights,
        shape.scale * _LOG2E,
        q.stride(0),
        tables.stride(0),
        shape.block_tokens,
        shape.kv_heads,
        group,
        group_block,
        max(_LEAST_QUERIES, in_tile * group_block),
        size,
        channels,
        _TOKENS,
        splits,
        tiles is not None,
        "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3 if q.dtype != torch.float32 else 1,
        **more,
    )
    if splits > 1:
        _join[(count, shape.heads)](partial, weights, positions, out, size, channels, splits, num_warps=4, **more)
    return out
