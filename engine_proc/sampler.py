"""From logits to ids, for all rows of a step at once and on the device.

Order of work: logprobs of the model's own distribution; logit_bias, banned and stop ids; penalties; then the best
id, or temperature, min_p, top_k, top_p and a draw by the Gumbel trick with counter-based noise. The host decides
from the slots' traits which rows need what; an all-greedy step is one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    ids: torch.Tensor  # int64 [R]
    finite: torch.Tensor  # bool [R]
    logprobs: torch.Tensor | None = None  # fp32 [L, 1 + top]: the chosen id's, then those of top_ids
    top_ids: torch.Tensor | None = None  # int64 [L, top]


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
    logprob_rows: list[int]
    logprobs: Handle | None
    top: int  # most alternatives of any row


class Sampler:
    """Samples rows of slots; the slots' state is in `table`."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self._terms = noise.token_terms(table.vocab_size, table.device)

    def plan(
        self, slots: Sequence[int], positions: Sequence[int], poisoned: Sequence[int], upload: Upload
    ) -> SamplePlan:
        """Row i samples the id at absolute position positions[i] of the sequence in slots[i]."""
        edits: list[tuple[int, int]] = []
        stops: list[tuple[int, int]] = []
        penalties: list[tuple[int, int, int]] = []
        drawn: list[tuple[int, int, int]] = []
        wanted: list[int] = []
        min_p, top_p, largest_k, top = False, False, 0, 0
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            traits = self.table.traits(slot)
            if traits.edits:
                edits.append((row, slot))
            if traits.stops and position < traits.min_position:
                stops.append((row, slot))
            if traits.counts_row >= 0:
                penalties.append((row, slot, traits.counts_row))
            if traits.logprobs >= 0:
                wanted.append(row)
                top = max(top, traits.logprobs)
            if not traits.greedy:
                drawn.append((row, slot, position))
                min_p |= traits.min_p
                top_p |= traits.top_p
                largest_k = max(largest_k, traits.top_k)

        def columns(entries: Sequence[tuple[int, ...]]) -> Handle | None:
            return upload.add(list(zip(*entries, strict=True))) if entries else None

        return SamplePlan(
            edits=columns(edits),
            stops=columns(stops),
            penalties=columns(penalties),
            drawn=columns(drawn),
            min_p=min_p,
            top_p=top_p,
            largest_k=largest_k,
            poisoned=upload.add(poisoned) if poisoned else None,
            logprob_rows=wanted,
            logprobs=upload.add(wanted) if wanted else None,
            top=top,
        )

    def sample(self, logits: torch.Tensor, plan: SamplePlan) -> Sampled:
        """logits fp32 [R, V], changed in place. Counts the produced ids of rows with penalties."""
        if plan.poisoned is not None:
            logits.index_fill_(0, plan.poisoned.tensor, float("nan"))
        # A sum is finite only if all its terms are (and one pass is enough, with nothing else written).
        finite = logits.sum(-1).isfinite()
        own = logits.index_select(0, plan.logprobs.tensor) if plan.logprobs is not None else None
        self._edit(logits, plan)
        ids = logits.argmax(-1)
        if plan.drawn is not None:
            rows = plan.drawn.tensor[0]
            ids.index_copy_(0, rows, self._draw(logits.index_select(0, rows), plan, plan.drawn.tensor))
        if plan.penalties is not None:
            rows, _, counted = plan.penalties.tensor
            self.table.counts.add_produced(counted, ids.index_select(0, rows))
        sampled = Sampled(ids, finite)
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
