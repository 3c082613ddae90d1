"""Steps that run as CUDA graphs: decode steps whole, and steps with short chunks up to their hidden states.

All that such a step reads of the host's is a few numbers per token; a batch is filled up to the next size of the
ladder with tokens that do nothing (position -1). Steps with long chunks are worth a launch of each kernel.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine_proc.attention.base import Capturable
from engine_proc.graphs import Graphs, ladder
from engine_proc.models.base import Model
from engine_proc.plan import Row
from engine_proc.sampler import Sampled, greedy
from engine_proc.upload import Upload

MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512)
_NOTHING = -1
# Tokens that the tiles of a step may read together; beyond, attention that reads a context once for a whole chunk wins.
_MOST_READS = 1 << 19


class CapturedSteps:
    """One model's steps over one backend's blocks. Row `max_running` of the slots is the one that fills batches."""

    def __init__(
        self, model: Model, backend: Capturable, last_id: torch.Tensor, max_running: int, capture: bool
    ) -> None:
        """last_id int64 [max_running + 1]: the ids that decode rows take. Without `capture` steps run as written."""
        self.model, self.backend = model, backend
        self.filler = max_running
        self._last_id = last_id
        device = last_id.device
        self._logits = torch.empty(max_running, model.config.vocab_size, dtype=torch.float32, device=device)
        decode = {size: self._filled(2, size, device) for size in ladder(max_running)}
        mixed = {tokens: self._filled(5, tokens, device) for tokens in MIXED_TOKENS}
        self.mixed = Graphs(self._mixed, mixed, capture)
        self.decode = Graphs(self._decode, decode, capture)

    def _filled(self, lines: int, size: int, device: torch.device) -> torch.Tensor:
        """int64 [lines, size]: slots and positions, and for mixed steps ids, and first tokens and counts of tiles."""
        inputs = torch.zeros(lines, size, dtype=torch.int64, device=device)
        inputs[0], inputs[1] = self.filler, _NOTHING
        return inputs

    def _decode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, Sampled]:
        """[2, B] → logits fp32 [B, V] and the best ids."""
        slots, positions = inputs
        ids = self._last_id.index_select(0, slots)
        hidden = self.model.forward(ids, positions, self.backend.rows(slots, positions, None), None)
        logits = self.model.logits(hidden, self._logits[: len(slots)])
        return logits, greedy(logits)

    def _mixed(self, inputs: torch.Tensor) -> torch.Tensor:
        """[5, T] → final hidden states [T, hidden]."""
        slots, positions, given = inputs[:3]
        ids = torch.where(given < 0, self._last_id.index_select(0, slots), given)
        return self.model.forward(ids, positions, self.backend.rows(slots, positions, inputs[3:]), None)

    def part(self, rows: list[Row], upload: Upload) -> DecodeStep | MixedStep | None:
        """The step of these rows, or None if it is not one for a graph."""
        if rows[-1].ids is None:
            return DecodeStep(self, rows, upload)
        tokens = sum(row.count for row in rows)
        if tokens > MIXED_TOKENS[-1]:
            return None
        tile = self.backend.tile_tokens
        if sum(-(-row.count // tile) * (row.start + row.count) for row in rows) > _MOST_READS:
            return None
        return MixedStep(self, rows, self.mixed.size_for(tokens), upload)


class DecodeStep:
    """Decode rows alone."""

    def __init__(self, steps: CapturedSteps, rows: list[Row], upload: Upload) -> None:
        self._steps = steps
        self._rows = len(rows)
        self._size = steps.decode.size_for(len(rows))
        inputs = np.empty((2, self._size), np.int64)
        inputs[0, self._rows :], inputs[1, self._rows :] = steps.filler, _NOTHING
        inputs[0, : self._rows] = [row.slot for row in rows]
        inputs[1, : self._rows] = [row.start for row in rows]
        self._inputs = upload.add(inputs)
        self._added = steps.backend.append(rows, upload)

    def run(self) -> tuple[torch.Tensor, Sampled | None] | None:
        """Logits fp32 [rows, V], and what greedy sampling finds in them."""
        self._steps.backend.write_tables(self._added)
        logits, best = self._steps.decode.run(self._size, self._inputs.tensor)
        return logits[: self._rows], Sampled(best.ids[: self._rows], best.finite[: self._rows])


class MixedStep:
    """Decode rows and short chunks."""

    def __init__(self, steps: CapturedSteps, rows: list[Row], size: int, upload: Upload) -> None:
        self._steps, self._size = steps, size
        inputs = np.zeros((5, size), np.int64)
        inputs[0], inputs[1] = steps.filler, _NOTHING
        ends = np.cumsum([row.count for row in rows])
        tiles: list[npt.NDArray[np.int64]] = []
        for row, end in zip(rows, ends.tolist(), strict=True):
            span = slice(end - row.count, end)
            inputs[0, span] = row.slot
            inputs[1, span] = np.arange(row.start, row.start + row.count)
            inputs[2, span] = _NOTHING if row.ids is None else row.ids
            first = np.arange(end - row.count, end, steps.backend.tile_tokens)
            tiles.append(np.stack((first, np.minimum(steps.backend.tile_tokens, end - first))))
        found = np.concatenate(tiles, axis=1)
        inputs[3:, : found.shape[1]] = found
        self._inputs = upload.add(inputs)
        self._added = steps.backend.append(rows, upload)
        samples = [end - 1 for row, end in zip(rows, ends.tolist(), strict=True) if row.sample]
        self._samples = upload.add(samples) if samples else None

    def run(self) -> tuple[torch.Tensor, Sampled | None] | None:
        """Logits fp32 [sampled rows, V], or None if no row samples."""
        self._steps.backend.write_tables(self._added)
        hidden = self._steps.mixed.run(self._size, self._inputs.tensor)
        if self._samples is None:
            return None
        return self._steps.model.logits(hidden.index_select(0, self._samples.tensor)), None
