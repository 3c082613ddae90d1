"""The rows of one forward pass, with the numbers that several parts need of them as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_proc.plan import Row

Numbers = npt.NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """Decode rows first. slots, starts, counts: int64 [rows], the rows' fields of these names."""

    rows: list[Row]
    decode: int  # number of decode rows
    slots: Numbers
    starts: Numbers
    counts: Numbers

    @classmethod
    def of(cls, rows: list[Row]) -> Batch:
        """At least one row."""
        slots = np.array([row.slot for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        if rows[-1].ids is None:
            return cls(rows, len(rows), slots, starts, np.ones(len(rows), np.int64))
        counts = np.array([row.count for row in rows], np.int64)
        return cls(rows, sum(row.ids is None for row in rows), slots, starts, counts)

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def positions(self) -> Numbers:
        """int64 [tokens], of every token of the rows, one after the other."""
        ends = np.cumsum(self.counts)
        found: Numbers = np.arange(ends[-1]) + np.repeat(self.starts - (ends - self.counts), self.counts)
        return found

    def given(self) -> npt.NDArray[np.int32]:
        """Ids of the rows that bring theirs, one after the other."""
        found = [row.ids for row in self.rows[self.decode :] if row.ids is not None]
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def sampled_tokens(self) -> Numbers:
        """Of the rows that sample: the index of the last token."""
        return (np.cumsum(self.counts) - 1)[[row.sample for row in self.rows]]
