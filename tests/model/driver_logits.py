"""Teacher-forced logits at every position, computed with the engine's own model and attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine_proc.batch import Batch
from engine_proc.plan import Row
from engine_proc.runner import Runner
from engine_proc.upload import Upload
from tests.model.driver import Driver, Ids


def forward(runner: Runner, rows: Sequence[Row], ids: Sequence[Ids]) -> torch.Tensor:
    """Rows as in a plan (decode rows first, by rising start); `ids` are their input ids. → logits fp32 [T, V]."""
    upload = Upload(runner.device)
    given = upload.add(np.concatenate([np.asarray(part) for part in ids]))
    positions = upload.add(np.concatenate([np.arange(row.start, row.start + row.count) for row in rows]))
    attention = runner.backend.prepare(Batch.of(list(rows)), upload)
    upload.send()
    with torch.inference_mode():
        return runner.model.logits(runner.model.forward(given.tensor, positions.tensor, attention, None))


class Forced:
    """One sequence of known ids: the first `prompt` in prefill rows of at most `chunk`, the rest as decode rows."""

    def __init__(self, driver: Driver, ids: Ids, prompt: int, chunk: int, cached: int = 0, prefix: Ids = ()) -> None:
        self.ids = np.asarray(ids, np.int32)
        self.prompt = prompt
        self.chunk = chunk
        self.at = cached
        count = -(-len(self.ids) // driver.size) - len(prefix)
        self.blocks = np.array([*prefix, *(driver.free.pop() for _ in range(count))], np.int32)
        self.slot = 0
        self.logits: list[torch.Tensor] = []

    def take(self, start: int, logits: torch.Tensor) -> None:
        """Logits [n, V] of the positions from `start`; kept, unless a subclass looks at them at once."""
        self.logits.append(logits)

    def row(self) -> Row:
        end = min(self.at + self.chunk, self.prompt) if self.at < self.prompt else self.at + 1
        given = self.ids[self.at : end] if self.at < self.prompt else None
        return Row(self.slot, self.at, end - self.at, given, self.blocks, False)


def run(driver: Driver, sequences: Sequence[Forced]) -> list[torch.Tensor]:
    """All sequences together, each step one row of each that is not done; → what each kept, [tokens, V]."""
    for slot, sequence in enumerate(sequences):
        sequence.slot = slot
        driver.runner.backend.open_slot(slot)
    while live := [sequence for sequence in sequences if sequence.at < len(sequence.ids)]:
        pairs = [(sequence, sequence.row()) for sequence in live]
        pairs.sort(key=lambda pair: (pair[1].ids is not None, pair[1].start if pair[1].ids is None else 0))
        rows = [row for _, row in pairs]
        logits = forward(driver.runner, rows, [s.ids[row.start : row.start + row.count] for s, row in pairs])
        parts = torch.split(logits, [row.count for row in rows])
        for (sequence, row), part in zip(pairs, parts, strict=True):
            sequence.take(row.start, part)
            sequence.at += row.count
    driver.free.extend(int(block) for sequence in sequences for block in sequence.blocks)
    return [torch.cat(sequence.logits) for sequence in sequences if sequence.logits]
