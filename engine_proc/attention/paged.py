"""The attention backend for CUDA: block tables live on the device, decode reads K and V in place.

Each slot has a row of the table. Blocks are appended to it when a step first needs them, in the order of the stream,
so a step is described by (slot, position) of each of its tokens and nothing else: that is why steps can be captured
in CUDA graphs. Long prefill rows read their context as one piece (a view where its blocks lie behind each other,
else a copy of a few milliseconds' worth of bandwidth at most) and take torch's fused attention, aligned at the last
query and key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from engine_proc.attention.base import Room, new_cache
from engine_proc.batch import Batch, Numbers
from engine_proc.kernels import paged_attention, store
from engine_proc.models.rotary import Rotary
from engine_proc.upload import Handle, Upload


@dataclass(slots=True)
class _Prefill:
    """One prefill row: tokens [first, first + count) of the batch; positions [0, end) are attended to."""

    slot: int
    first: int
    count: int
    end: int
    run: int  # first block, where the blocks lie behind each other; else -1


class PagedBackend:
    """See `attention.base.AttentionBackend`."""

    def __init__(self, room: Room, device: torch.device, dtype: torch.dtype) -> None:
        shape = room.shape
        self.shape, self.device, self.dtype = shape, device, dtype
        self.cache = new_cache(shape, room.num_blocks, device, dtype)
        width = 1 + min(room.num_blocks, -(-(room.context_length + 1) // shape.block_tokens))
        self.tables = torch.zeros(room.max_running + 1, width, dtype=torch.int32, device=device)
        self._known = np.zeros(room.max_running, np.int64)  # blocks of each slot that its row of the table has
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def open_slot(self, slot: int) -> None:
        self._known[slot] = 0

    @property
    def spare_place(self) -> int:
        return self.tables.numel() - 1

    def append(self, batch: Batch) -> tuple[Numbers, Numbers]:
        need = (batch.starts + batch.counts - 1) // self.shape.block_tokens + 1
        short = np.flatnonzero(need > self._known[batch.slots])
        if not len(short):
            return short, short
        width = self.tables.shape[1]
        places, blocks = [], []
        for index in short.tolist():
            row, end = batch.rows[index], int(need[index])
            first = int(self._known[row.slot])
            places.append(np.arange(row.slot * width + first, row.slot * width + end))
            blocks.append(row.blocks[first:end])
            self._known[row.slot] = end
        return np.concatenate(places), np.concatenate(blocks).astype(np.int64)

    def write_tables(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        self.tables.view(-1).index_copy_(0, places, blocks.to(torch.int32))

    def prepare(self, batch: Batch, upload: Upload) -> PagedStep:
        slots = upload.add(np.repeat(batch.slots, batch.counts))
        positions = upload.add(batch.positions())
        prefill = []
        first = batch.decode
        for row in batch.rows[batch.decode :]:
            end = row.start + row.count
            run = _run(row.blocks[: -(-end // self.shape.block_tokens)])
            prefill.append(_Prefill(row.slot, first, row.count, end, run))
            first += row.count
        places, blocks = self.append(batch)
        added = upload.add(np.stack((places, blocks))) if len(places) else None
        return PagedStep(self, slots, positions, batch.decode, prefill, added)

    @property
    def tile_tokens(self) -> int:
        return paged_attention.tile_tokens(self.shape)

    def rows(self, slots: torch.Tensor, positions: torch.Tensor, tiles: torch.Tensor | None) -> PagedRows:
        return PagedRows(self, slots, positions, tiles)

    def splits(self, tiles: int) -> int:
        return paged_attention.splits_for(max(1, tiles), self.shape.kv_heads, self._processors)


def _run(blocks: npt.NDArray[np.int32]) -> int:
    """The first of blocks that lie behind each other, else -1."""
    first = int(blocks[0])
    is_run = int(blocks[-1]) - first == len(blocks) - 1 and bool((np.diff(blocks) == 1).all())
    return first if is_run else -1


class PagedRows:
    """Attention of a step that device tensors alone describe. See `models.base.LayerAttention`."""

    def __init__(
        self, backend: PagedBackend, slots: torch.Tensor, positions: torch.Tensor, tiles: torch.Tensor | None
    ) -> None:
        self._backend, self._slots, self._positions, self._tiles = backend, slots, positions, tiles
        likely = len(slots) if tiles is None else len(slots) // backend.tile_tokens
        self._splits = backend.splits(likely)

    def attend(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        backend = self._backend
        cache = backend.cache[layer]
        store.prepare(qkv, rotary, backend.shape, cache, backend.tables, self._slots, self._positions)
        q = qkv[:, : backend.shape.heads]
        return paged_attention.attend(
            q, cache, backend.tables, self._slots, self._positions, backend.shape, self._splits, self._tiles
        )


class PagedStep:
    """Attention of one step with prefill rows. See `models.base.LayerAttention`."""

    def __init__(
        self,
        backend: PagedBackend,
        slots: Handle,
        positions: Handle,
        decode: int,
        prefill: list[_Prefill],
        added: Handle | None,
    ) -> None:
        self._backend, self._slots, self._positions = backend, slots, positions
        self._decode, self._prefill, self._added = decode, prefill, added
        self._splits = backend.splits(decode)

    def attend(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        backend, shape = self._backend, self._backend.shape
        if self._added is not None:
            backend.write_tables(*self._added.tensor)
            self._added = None
        cache = backend.cache[layer]
        slots, positions = self._slots.tensor, self._positions.tensor
        store.prepare(qkv, rotary, shape, cache, backend.tables, slots, positions)
        both = shape.heads + shape.kv_heads
        q, k, v = qkv[:, : shape.heads], qkv[:, shape.heads : both], qkv[:, both:]
        out = torch.empty(q.shape[0], shape.heads * shape.head_dim, dtype=q.dtype, device=q.device)
        if n := self._decode:
            out[:n] = paged_attention.attend(
                q[:n], cache, backend.tables, slots[:n], positions[:n], shape, self._splits
            )
        for row in self._prefill:
            span = slice(row.first, row.first + row.count)
            if row.count == row.end:  # nothing before it: its own K and V are all
                keys, values = k[span], v[span]
            else:
                keys, values = self._read(cache, row)
            attended = _causal(q[span], keys, values, shape.scale)
            out[span] = attended.view(row.count, -1)
        return out

    def _read(self, cache: torch.Tensor, row: _Prefill) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [end, kv_heads, D] of one row's positions."""
        shape = self._backend.shape
        count = -(-row.end // shape.block_tokens)
        if row.run >= 0:
            both = cache[:, row.run : row.run + count]
        else:
            both = cache.index_select(1, self._backend.tables[row.slot, :count])
        flat = both.reshape(2, -1, shape.kv_heads, shape.head_dim)
        return flat[0, : row.end], flat[1, : row.end]


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [T, heads, D], k and v [S, kv_heads, D]; the last query sees all keys, each one before it one less."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.dtype == torch.float32:  # the kernel for fp32 does not group queries
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        grouped = False
    mask = causal_lower_right(q.shape[2], k.shape[2]) if q.shape[2] > 1 else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, scale=scale)
    return out[0].transpose(0, 1).contiguous()
