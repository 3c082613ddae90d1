"""From logits to ids, for all rows of a step at once and on the device.

Order of work: logprobs of the model's own distribution; logit_bias, banned and stop ids; penalties; then the best
id, or temperature, min_p, top_k, top_p and a draw by the Gumbel trick with counter-based noise. The host decides
from the slots' traits which rows need what; an all-greedy step is one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_proc import filters, noise
from engine_proc.slots import (
    CHOICE,
    FREQUENCY,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SlotTable,
)
from engine_proc.upload import Handle, Upload


@dataclass(slots=True)
class Sampled:
    """Device tensors of one step, one entry per row."""

    packed: torch.Tensor  # int64 [R, 2]: the id, and whether the logits were finite
    logprobs: torch.Tensor | None = None  # fp32 [L, 1 + top]: the chosen id's, then those of top_ids
    top_ids: torch.Tensor | None = None  # int64 [L, top]

    @property
    def ids(self) -> torch.Tensor:
        """int64 [R]."""
        return self.packed[:, 0]

    @property
    def finite(self) -> torch.Tensor:
        """int64 [R], 0 or 1."""
        return self.packed[:, 1]

    def first(self, rows: int) -> Sampled:
        """Of the first rows; not for one with logprobs."""
        return Sampled(self.packed[:rows])


@dataclass(slots=True)
class SamplePlan:
    """Which rows need what; row numbers are indices into the step's sampled rows, handles int64."""

    edits: Handle | None  # [2, E]: rows, slots
    stops: Handle | None  # [2, E]: rows, slots
    penalties: Handle | None  # [3, P]: rows, slots, rows of the counts
    drawn: Handle | None  # [3, D]: rows, slots, positions
    min_p: bool
    top_p: bool
    largest_k: int  # 0 = no row has top_k
    poisoned: Handle | None  # rows whose logits a test hook makes non-finite
    wanted: dict[int, int]  # rows that give logprobs → number of alternatives
    logprobs: Handle | None
    top: int  # most alternatives of any row


class Sampler:
    """Samples rows of slots; the slots' state is in `table`."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self._terms = noise.token_terms(table.vocab_size, table.device)

    def plan(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], poisoned: Sequence[int], upload: Upload
    ) -> SamplePlan:
        """Row i samples the id at absolute position positions[i] of the sequence in slots[i], which is open."""
        traits = self.table.traits
        if not traits.open[slots].all():
            raise RuntimeError(f"slot {slots[~traits.open[slots]][0]} is not open")

        def columns(rows: npt.NDArray[np.int64], *more: npt.NDArray[np.int64]) -> Handle | None:
            """[2 + more, rows]: the rows, their slots, and what else they need."""
            return upload.add(np.stack((rows, slots[rows], *(each[rows] for each in more)))) if len(rows) else None

        drawn = np.flatnonzero(traits.drawn[slots])
        drawn_slots = slots[drawn]
        counted = traits.counts_row[slots]
        wanted = traits.logprobs[slots]
        wanted_rows = np.flatnonzero(wanted >= 0)
        return SamplePlan(
            edits=columns(np.flatnonzero(traits.edits[slots])),
            stops=columns(np.flatnonzero(positions < traits.stops_below[slots])),
            penalties=columns(np.flatnonzero(counted >= 0), counted),
            drawn=columns(drawn, positions),
            min_p=bool(traits.min_p[drawn_slots].any()),
            top_p=bool(traits.top_p[drawn_slots].any()),
            largest_k=int(traits.top_k[drawn_slots].max(initial=0)),
            poisoned=upload.add(poisoned) if poisoned else None,
            wanted=dict(zip(wanted_rows.tolist(), wanted[wanted_rows].tolist(), strict=True)),
            logprobs=upload.add(wanted_rows) if len(wanted_rows) else None,
            top=int(wanted.max(initial=0)),
        )

    def sample(self, logits: torch.Tensor, plan: SamplePlan, best: Sampled | None = None) -> Sampled:
        """logits fp32 [R, V], changed in place. Counts the produced ids of rows with penalties.

        `best`: what `greedy` found in these logits, if that is known already; its memory may be used.
        """
        if plan.poisoned is not None:
            logits.index_fill_(0, plan.poisoned.tensor, float("nan"))
            best = None
        if best is None:
            best = greedy(logits)
        own = logits.index_select(0, plan.logprobs.tensor) if plan.logprobs is not None else None
        sampled = best
        ids = sampled.ids
        if plan.edits is not None or plan.stops is not None or plan.penalties is not None:
            self._edit(logits, plan)
            ids.copy_(logits.argmax(-1))
        if plan.drawn is not None:
            rows = plan.drawn.tensor[0]
            ids.index_copy_(0, rows, self._draw(logits.index_select(0, rows), plan, plan.drawn.tensor))
        if plan.penalties is not None:
            rows, _, counted = plan.penalties.tensor
            self.table.counts.add_produced(counted, ids.index_select(0, rows))
        if own is not None and plan.logprobs is not None:
            _add_logprobs(sampled, own, ids.index_select(0, plan.logprobs.tensor), plan.top)
        return sampled

    def _edit(self, logits: torch.Tensor, plan: SamplePlan) -> None:
        if plan.edits is not None:
            self.table.edits.add_to(logits, plan.edits.tensor[0], plan.edits.tensor[1])
        if plan.stops is not None:
            self.table.stops.add_to(logits, plan.stops.tensor[0], plan.stops.tensor[1])
        if plan.penalties is not None:
            rows, slots, counted = plan.penalties.tensor
            floats = self.table.floats.index_select(0, slots)
            counts = self.table.counts.counts.index_select(0, counted)
            logits.index_copy_(0, rows, penalise(logits.index_select(0, rows), counts, floats))

    def _draw(self, z: torch.Tensor, plan: SamplePlan, drawn: torch.Tensor) -> torch.Tensor:
        """z fp32 [D, V] → int64 [D]."""
        _, slots, positions = drawn
        floats = self.table.floats.index_select(0, slots)
        ints = self.table.ints.index_select(0, slots)
        z.div_(floats[:, TEMPERATURE, None])
        if plan.min_p or plan.top_p or plan.largest_k:
            filters.keep_likely(
                z,
                floats[:, MIN_P] if plan.min_p else None,
                ints[:, TOP_K] if plan.largest_k else None,
                plan.largest_k,
                floats[:, TOP_P] if plan.top_p else None,
            )
        keys = noise.row_keys(ints[:, SEED], ints[:, CHOICE], positions)
        return z.add_(noise.gumbel(keys, self._terms)).argmax(-1)


def greedy(logits: torch.Tensor) -> Sampled:
    """logits fp32 [R, V] → the best ids, and which rows are finite."""
    # A sum is finite only if all its terms are (and one pass is enough, with nothing else written).
    return Sampled(torch.stack((logits.argmax(-1), logits.sum(-1).isfinite().to(torch.int64)), dim=1))


def penalise(logits: torch.Tensor, counts: torch.Tensor, floats: torch.Tensor) -> torch.Tensor:
    """logits fp32 [P, V], counts int32 [P, V] of `PenaltyCounts`, floats [P, 6] of `SlotTable` → new logits.

    Repetition divides positive and multiplies other logits of every id seen; then frequency and presence are
    subtracted for ids produced.
    """
    repetition = floats[:, REPETITION, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    produced = counts >> 1
    out = torch.where(counts > 0, scaled, logits)
    out -= floats[:, FREQUENCY, None] * produced
    out -= floats[:, PRESENCE, None] * (produced > 0)
    return out


def _add_logprobs(sampled: Sampled, own: torch.Tensor, chosen: torch.Tensor, top: int) -> None:
    """own: the model's logits fp32 [L, V]; chosen int64 [L]."""
    total = own.logsumexp(-1, keepdim=True)
    values = own.gather(1, chosen[:, None])
    if top:
        best = own.topk(top)
        sampled.top_ids = best.indices
        values = torch.cat((values, best.values), dim=1)
    sampled.logprobs = values - total
