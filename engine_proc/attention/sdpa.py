"""The portable attention backend: torch's scaled_dot_product_attention over gathered or directly viewed blocks.

Decode rows are attended in groups of similar context length, one call per group and layer. The `heads / kv_heads`
queries that share a KV head become the query positions of that head, so K and V are never repeated. A long decode
row whose blocks lie behind each other in memory is attended in place, without a copy. Prefill rows are attended one
by one, in pieces of at most `_PIECE` query tokens where a mask is needed, all of which share one triangular mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine_proc.attention.base import Room, new_cache
from engine_proc.batch import Batch
from engine_proc.models.rotary import Rotary
from engine_proc.plan import Row
from engine_proc.upload import Handle, Upload

_PIECE = 256  # query tokens per call under a mask
_MASK_ALIGN = 16  # elements
_ALONE_TOKENS = 129  # from this context on, a call of its own costs less than copying K and V
_GROUP_BYTES = 256 << 20  # gathered K and V of one group in one layer
_PADDING = 1.25  # a group may attend to this many times the tokens that its rows need
_SMALL_TOKENS = 256  # below this context padding does not matter


@dataclass(slots=True)
class _Context:
    """Where the K and V of one row's positions [0, length) are: a run of blocks, or a table to gather."""

    length: int
    first_block: int  # -1: not a run
    table: Handle | None  # int64 [2, blocks]: rows of K, then of V


@dataclass(slots=True)
class _Group:
    """Decode rows [first, end) of the batch, attended in one call."""

    first: int
    end: int
    context: _Context | None  # one row alone
    length: int = 0  # longest context
    table: Handle | None = None  # int64 [2, rows, blocks]
    lengths: Handle | None = None  # int64 [rows]


@dataclass(slots=True)
class _Prefill:
    """One prefill row: tokens [first, first + count) of the batch at positions from `start`."""

    first: int
    start: int
    count: int
    context: _Context | None  # None: nothing is cached before the row, its own K and V are all


class SdpaBackend:
    """See `attention.base.AttentionBackend`."""

    def __init__(self, room: Room, device: torch.device, dtype: torch.dtype) -> None:
        shape, num_blocks = room.shape, room.num_blocks
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        self.dtype = dtype
        self.cache = new_cache(shape, num_blocks, device, dtype)
        self._triangle = torch.empty(0, 0, dtype=dtype, device=device)

    def open_slot(self, slot: int) -> None:
        """Nothing is kept per slot: each step brings its tables."""

    def prepare(self, batch: Batch, upload: Upload) -> SdpaStep:
        rows = batch.rows
        decode = rows[: batch.decode]
        prefill: list[_Prefill] = []
        first = len(decode)
        for row in rows[len(decode) :]:
            end = row.start + row.count
            context = self._context(row.blocks, end, upload) if row.start else None
            prefill.append(_Prefill(first, row.start, row.count, context))
            if context is not None and row.count > 1:
                self._grow_triangle(end)
            first += row.count
        return SdpaStep(self, upload.add(self._write_rows(rows)), self._groups(decode, upload), prefill)

    def _write_rows(self, rows: Sequence[Row]) -> npt.NDArray[np.int64]:
        """[T, 2]: where each token's K and V go: rows of one layer's cache seen as [2 * num_blocks * tokens, ...]."""
        size = self.shape.block_tokens
        places = np.empty(sum(row.count for row in rows), dtype=np.int64)
        at = 0
        for row in rows:
            if row.count == 1:
                places[at] = int(row.blocks[row.start // size]) * size + row.start % size
            else:
                positions = np.arange(row.start, row.start + row.count)
                places[at : at + row.count] = row.blocks[positions // size].astype(np.int64) * size + positions % size
            at += row.count
        return np.stack((places, places + self.num_blocks * size), axis=1)

    def _context(self, blocks: npt.NDArray[np.int32], length: int, upload: Upload) -> _Context:
        table = blocks[: -(-length // self.shape.block_tokens)].astype(np.int64)
        if _is_run(table):
            return _Context(length, int(table[0]), None)
        return _Context(length, -1, upload.add(np.stack((table, table + self.num_blocks))))

    def _groups(self, rows: list[Row], upload: Upload) -> list[_Group]:
        """Splits decode rows (by rising context) so that padding and gathered memory stay bounded."""
        groups: list[_Group] = []
        first = 0
        while first < len(rows):
            shortest = rows[first].start + 1
            if (shortest >= _ALONE_TOKENS or len(rows) == 1) and self.device.type == "cpu":
                context = self._context(rows[first].blocks, shortest, upload)
                if context.table is None:
                    groups.append(_Group(first, first + 1, context))
                    first += 1
                    continue
            end = self._group_end(rows, first)
            groups.append(self._group(rows, first, end, upload))
            first = end
        return groups

    def _group_end(self, rows: list[Row], first: int) -> int:
        shape = self.shape
        token_bytes = 2 * shape.kv_heads * shape.head_dim * self.dtype.itemsize
        needed = 0
        end = first
        for row in rows[first:]:
            length = row.start + 1
            padded = length * (end - first + 1)
            fits = padded * token_bytes <= _GROUP_BYTES
            close = length <= _SMALL_TOKENS or padded <= _PADDING * (needed + length)
            if end > first and not (fits and close):
                break
            needed += length
            end += 1
        return end

    def _group(self, rows: list[Row], first: int, end: int, upload: Upload) -> _Group:
        size = self.shape.block_tokens
        lengths = np.array([row.start + 1 for row in rows[first:end]])
        counts = -(-lengths // size)
        table = np.zeros((end - first, int(counts.max())), dtype=np.int64)
        used = np.arange(table.shape[1]) < counts[:, None]
        table[used] = np.concatenate([row.blocks[:n] for row, n in zip(rows[first:end], counts.tolist(), strict=True)])
        both = np.stack((table, table + self.num_blocks))
        return _Group(first, end, None, int(lengths.max()), upload.add(both), upload.add(lengths))

    def _grow_triangle(self, tokens: int) -> None:
        """Mask [_PIECE, width]: the last query sees all columns, each one above it one column less."""
        if self._triangle.shape[1] >= tokens:
            return
        width = 1 << (max(tokens, 2 * _PIECE) - 1).bit_length()
        rows = torch.arange(_PIECE, device=self.device)[:, None]
        columns = torch.arange(width, device=self.device)
        mask = torch.zeros(_PIECE, width, dtype=self.dtype, device=self.device)
        self._triangle = mask.masked_fill_(columns > width - _PIECE + rows, float("-inf"))

    def triangle(self, queries: int, keys: int) -> torch.Tensor:
        """Causal mask [queries, keys], aligned at the last query and the last key."""
        mask = self._triangle[_PIECE - queries :, self._triangle.shape[1] - keys :]
        if self.device.type == "cpu":
            return mask
        # CUDA kernels read masks 16 bytes at a time and do not look where a view begins: rows must begin aligned.
        padded = torch.empty(queries, -(-keys // _MASK_ALIGN) * _MASK_ALIGN, dtype=self.dtype, device=self.device)
        padded[:, :keys] = mask
        return padded[:, :keys]


def _is_run(table: npt.NDArray[np.int64]) -> bool:
    return bool(table[-1] - table[0] == len(table) - 1 and (np.diff(table) == 1).all())


class SdpaStep:
    """Attention of one step. See `models.base.LayerAttention`."""

    def __init__(self, backend: SdpaBackend, write_rows: Handle, groups: list[_Group], prefill: list[_Prefill]) -> None:
        self._backend = backend
        self._shape = backend.shape
        self._write_rows = write_rows
        self._groups = groups
        self._prefill = prefill
        self._masks: dict[int, torch.Tensor] = {}
        self._triangles: dict[tuple[int, int], torch.Tensor] = {}

    def attend(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        shape = self._shape
        q, k, v = rotary.apply(qkv, shape.heads, shape.kv_heads)
        cache = self._backend.cache[layer]
        rows = cache.view(-1, shape.kv_heads, shape.head_dim)
        rows[self._write_rows.tensor] = torch.stack((k, v), dim=1)
        out = torch.empty(q.shape[0], shape.heads, shape.head_dim, dtype=q.dtype, device=q.device)
        for group in self._groups:
            out[group.first : group.end] = self._decode(cache, group, q[group.first : group.end])
        for row in self._prefill:
            self._attend_row(cache, row, q, k, v, out)
        return out.view(q.shape[0], -1)

    def _decode(self, cache: torch.Tensor, group: _Group, q: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, D] → the same shape."""
        shape = self._shape
        rows = group.end - group.first
        queries = q.reshape(rows, shape.kv_heads, -1, shape.head_dim)
        if group.context is not None:
            k, v = (part[None] for part in self._read(cache, group.context))
            mask = None
        else:
            assert group.table is not None
            gathered = cache.view(2 * self._backend.num_blocks, -1).index_select(0, group.table.tensor.view(-1))
            both = gathered.view(2, rows, -1, shape.kv_heads, shape.head_dim)[:, :, : group.length]
            k, v = both[0], both[1]
            mask = self._mask(group)
        out = F.scaled_dot_product_attention(
            queries, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=shape.scale
        )
        return out.reshape(rows, shape.heads, shape.head_dim)

    def _mask(self, group: _Group) -> torch.Tensor | None:
        """[rows, 1, 1, length]: 0 where a row has a token, else -inf; the same for all layers of the step."""
        if group.end - group.first == 1:
            return None
        if group.first not in self._masks:
            assert group.lengths is not None
            columns = torch.arange(group.length, device=self._backend.device)
            hidden = columns >= group.lengths.tensor[:, None]
            mask = torch.zeros(hidden.shape, dtype=self._backend.dtype, device=self._backend.device)
            self._masks[group.first] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[group.first]

    def _triangle(self, queries: int, keys: int) -> torch.Tensor:
        """See `SdpaBackend.triangle`; the same for all layers of the step."""
        if (queries, keys) not in self._triangles:
            self._triangles[queries, keys] = self._backend.triangle(queries, keys)
        return self._triangles[queries, keys]

    def _read(self, cache: torch.Tensor, context: _Context) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [length, kv_heads, D] of one row's positions."""
        shape = self._shape
        if context.table is None:
            count = -(-context.length // shape.block_tokens)
            both = cache[:, context.first_block : context.first_block + count]
        else:
            both = cache.view(2 * self._backend.num_blocks, -1).index_select(0, context.table.tensor.view(-1))
        flat = both.reshape(2, -1, shape.kv_heads, shape.head_dim)[:, : context.length]
        return flat[0], flat[1]

    def _attend_row(
        self, cache: torch.Tensor, row: _Prefill, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        span = slice(row.first, row.first + row.count)
        if row.context is None:
            out[span] = self._causal(q[span], k[span], v[span], None, row.count > 1)
            return
        keys, values = self._read(cache, row.context)
        for first in range(0, row.count, _PIECE):
            count = min(_PIECE, row.count - first)
            end = row.start + first + count
            mask = self._triangle(count, end) if row.count > 1 else None
            piece = slice(row.first + first, row.first + first + count)
            out[piece] = self._causal(q[piece], keys[:end], values[:end], mask, False)

    def _causal(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """q [T, heads, D], k and v [S, kv_heads, D] → [T, heads, D]. KV heads are the batch, so K and V are views."""
        shape = self._shape
        group = shape.heads // shape.kv_heads
        queries = q.reshape(-1, shape.kv_heads, group, shape.head_dim).permute(1, 2, 0, 3)
        keys = k.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1)
        values = v.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, scale=shape.scale
        )
        return attended.permute(2, 0, 1, 3).reshape(q.shape)
