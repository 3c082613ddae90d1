"""Steps that run as CUDA graphs: decode steps whole, and steps with short chunks up to their hidden states.

All that such a step reads of the host's is a few numbers per token; a batch is filled up to the next size of the
ladder with tokens that do nothing (position -1). Steps with long chunks are worth a launch of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_proc.attention.base import Capturable
from engine_proc.batch import Batch
from engine_proc.graphs import Graphs, ladder
from engine_proc.models.base import Model
from engine_proc.sampler import Sampled, greedy
from engine_proc.upload import Upload

MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512)
_NOTHING = -1
# Tokens that the tiles of a step may read together; beyond, attention that reads a context once for a whole chunk wins.
_MOST_READS = 1 << 19


@dataclass(slots=True)
class Computed:
    """What a forward pass has found; for rows that sample."""

    logits: torch.Tensor  # fp32 [R, V]
    best: Sampled | None = None  # what greedy sampling finds in them, if that is known
    slots: torch.Tensor | None = None  # int64 [R], if they are on the device


class CapturedSteps:
    """One model's steps over one backend's blocks. Row `max_running` of the slots is the one that fills batches."""

    def __init__(
        self,
        model: Model,
        backend: Capturable,
        last_id: torch.Tensor,
        max_running: int,
        capture: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        """last_id int64 [max_running + 1]: the ids that decode rows take. Without `capture` steps run as written.

        progress(done, total) counts captured sizes.
        """
        self.model, self.backend = model, backend
        self.filler = max_running
        self._last_id = last_id
        device = last_id.device
        self._logits = torch.empty(max_running, model.config.vocab_size, dtype=torch.float32, device=device)
        decode = {size: torch.from_numpy(self.filled(4, size)).to(device) for size in ladder(max_running)}
        mixed = {tokens: torch.from_numpy(self.filled(5, tokens)).to(device) for tokens in MIXED_TOKENS}
        total = len(mixed) + len(decode)
        self.mixed = Graphs(self._mixed, mixed)
        self.decode = Graphs(self._decode, decode)
        if capture:
            self.mixed.capture(lambda done: progress(done, total))
            self.decode.capture(lambda done: progress(len(mixed) + done, total))

    def filled(self, lines: int, size: int) -> npt.NDArray[np.int64]:
        """int64 [lines, size] of a step that does nothing: the lines of `_decode` or `_mixed`."""
        inputs = np.zeros((lines, size), np.int64)
        inputs[0], inputs[1] = self.filler, _NOTHING
        if lines == 4:
            inputs[2] = self.backend.spare_place
        return inputs

    def _decode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, Sampled]:
        """Slots, positions, places in the table and their new blocks [4, B] → logits fp32 [B, V] and the best ids."""
        slots, positions, places, blocks = inputs
        self.backend.write_tables(places, blocks)
        ids = self._last_id.index_select(0, slots)
        hidden = self.model.forward(ids, positions, self.backend.rows(slots, positions, None), None)
        logits = self.model.logits(hidden, self._logits[: len(slots)])
        return logits, greedy(logits)

    def _mixed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Slots, positions, given ids, first tokens and counts of tiles [5, T] → final hidden states [T, hidden]."""
        slots, positions, given = inputs[:3]
        ids = torch.where(given < 0, self._last_id.index_select(0, slots), given)
        return self.model.forward(ids, positions, self.backend.rows(slots, positions, inputs[3:]), None)

    def part(self, batch: Batch, upload: Upload) -> DecodeStep | MixedStep | None:
        """The step of this batch, or None if it is not one for a graph."""
        if batch.decode == len(batch.rows):
            return DecodeStep(self, batch)
        tokens = batch.tokens
        if tokens > MIXED_TOKENS[-1]:
            return None
        tiles = -(-batch.counts // self.backend.tile_tokens)
        if int((tiles * (batch.starts + batch.counts)).sum()) > _MOST_READS:
            return None
        return MixedStep(self, batch, self.mixed.size_for(tokens), upload)


def _staging(lines: int, size: int) -> torch.Tensor:
    return torch.empty(lines, size, dtype=torch.int64, pin_memory=True)


class DecodeStep:
    """Decode rows alone."""

    def __init__(self, steps: CapturedSteps, batch: Batch) -> None:
        self._steps = steps
        self._rows = rows = len(batch.rows)
        self._size = steps.decode.size_for(rows)
        self._staged = _staging(4, self._size)
        inputs = self._staged.numpy()
        inputs[0, :rows], inputs[1, :rows] = batch.slots, batch.starts
        inputs[0, rows:], inputs[1, rows:] = steps.filler, _NOTHING
        places, blocks = steps.backend.append(batch)
        new = len(places)  # at most one for each row, since its other blocks came with its chunks
        inputs[2, :new], inputs[3, :new] = places, blocks
        inputs[2, new:], inputs[3, new:] = steps.backend.spare_place, 0

    def run(self) -> Computed:
        logits, best = self._steps.decode.run(self._size, self._staged)
        slots = self._steps.decode.inputs[self._size][0, : self._rows]
        return Computed(logits[: self._rows], best.first(self._rows), slots)


class MixedStep:
    """Decode rows and short chunks."""

    def __init__(self, steps: CapturedSteps, batch: Batch, size: int, upload: Upload) -> None:
        self._steps, self._size = steps, size
        self._staged = _staging(5, size)
        inputs = self._staged.numpy()
        tokens, tile = batch.tokens, steps.backend.tile_tokens
        inputs[0, :tokens], inputs[1, :tokens] = np.repeat(batch.slots, batch.counts), batch.positions()
        inputs[0, tokens:], inputs[1, tokens:], inputs[2, tokens:] = steps.filler, _NOTHING, 0
        inputs[2, : batch.decode] = _NOTHING
        inputs[2, batch.decode : tokens] = batch.given()
        ends = np.cumsum(batch.counts)
        firsts = [np.arange(end - count, end, tile) for count, end in zip(batch.counts, ends, strict=True)]
        first = np.concatenate(firsts)
        inputs[3, : len(first)] = first
        inputs[4, : len(first)] = np.minimum(np.repeat(ends, [len(each) for each in firsts]) - first, tile)
        inputs[3, len(first) :], inputs[4, len(first) :] = 0, 0
        places, blocks = steps.backend.append(batch)
        self._added = upload.add(np.stack((places, blocks))) if len(places) else None
        samples = batch.sampled_tokens()
        self._samples = upload.add(samples) if len(samples) else None

    def run(self) -> Computed | None:
        """None if no row samples."""
        if self._added is not None:
            self._steps.backend.write_tables(*self._added.tensor)
        hidden = self._steps.mixed.run(self._size, self._staged)
        if self._samples is None:
            return None
        return Computed(self._steps.model.logits(hidden.index_select(0, self._samples.tensor)))
