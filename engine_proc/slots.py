"""What the sampler keeps per slot: on the device its parameters, edits and counts, on the host traits that steer it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_proc.plan import SlotState

GREEDY_BELOW = 1e-5  # temperatures below are greedy: their quotients would leave fp32's useful range

# columns of SlotTable.floats and SlotTable.ints
TEMPERATURE, MIN_P, TOP_P, REPETITION, FREQUENCY, PRESENCE = range(6)
SEED, CHOICE, TOP_K = range(3)


@dataclass(slots=True)
class Traits:
    """What the host must know of a slot to choose the work of a step."""

    greedy: bool
    top_k: int  # 0 = off
    top_p: bool
    min_p: bool
    edits: bool  # has biased or banned ids
    stops: bool  # has ids that are banned below min_position
    min_position: int
    logprobs: int  # -1 = none, else number of alternatives
    counts_row: int  # row in PenaltyCounts, -1 = no penalties


class SparseRows:
    """Per slot a short list of (id, value), padded to one width with (0, 0.0), on the device."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.ids = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self.values = torch.zeros(slots, 0, dtype=torch.float32, device=device)

    def set(self, slot: int, entries: list[tuple[int, float]]) -> None:
        """Replaces the list of `slot`; the width grows as needed."""
        short = len(entries) - self.ids.shape[1]
        if short > 0:
            more = -(-short // 32) * 32
            self.ids = torch.nn.functional.pad(self.ids, (0, more))
            self.values = torch.nn.functional.pad(self.values, (0, more))
        ids = np.zeros(self.ids.shape[1], dtype=np.int64)
        values = np.zeros(self.ids.shape[1], dtype=np.float32)
        ids[: len(entries)] = [token for token, _ in entries]
        values[: len(entries)] = [value for _, value in entries]
        self.ids[slot].copy_(_staged(ids, self.ids.device), non_blocking=True)
        self.values[slot].copy_(_staged(values, self.values.device), non_blocking=True)

    def add_to(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """logits [R, V], in place: row rows[i] gets the entries of slots[i]. Padding adds 0 to id 0."""
        flat = self.ids.index_select(0, slots) + rows[:, None] * logits.shape[1]
        logits.view(-1).index_add_(0, flat.view(-1), self.values.index_select(0, slots).view(-1))


class PenaltyCounts:
    """For sequences with penalties: how often each id was produced, and whether the prompt has it.

    int32 [rows, V], value = 2 * times produced + (1 if in the prompt). Rows are taken by slots as they need them.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def take(self, prompt: npt.NDArray[np.int32], produced: npt.NDArray[np.int32]) -> int:
        """A row holding the counts of these ids."""
        if not self._free:
            size = len(self.counts)
            self.counts = torch.nn.functional.pad(self.counts, (0, 0, 0, max(1, size)))
            self._free.extend(range(len(self.counts) - 1, size - 1, -1))
        row = self._free.pop()
        counts = self.counts[row].zero_()
        device = counts.device
        counts.index_fill_(0, _staged(prompt.astype(np.int64), device), 1)
        ids = _staged(produced.astype(np.int64), device)
        counts.index_add_(0, ids, torch.full_like(ids, 2, dtype=torch.int32))
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def add_produced(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Counts ids[i] in row rows[i] (rows differ); int64 [P] each."""
        flat = rows * self.counts.shape[1] + ids
        self.counts.view(-1).index_add_(0, flat, torch.full_like(flat, 2, dtype=torch.int32))


class SlotTable:
    """State of all slots. The device's part changes in stream order, so steps in flight see the former state."""

    def __init__(self, max_running: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.floats = torch.zeros(max_running, 6, dtype=torch.float32, device=device)
        self.ints = torch.zeros(max_running, 3, dtype=torch.int64, device=device)
        self.edits = SparseRows(max_running, device)
        self.stops = SparseRows(max_running, device)
        self.counts = PenaltyCounts(vocab_size, device)
        self._traits: list[Traits | None] = [None] * max_running

    def traits(self, slot: int) -> Traits:
        found = self._traits[slot]
        if found is None:
            raise RuntimeError(f"slot {slot} is not open")
        return found

    def open(self, slot: int, state: SlotState) -> None:
        """RuntimeError if the slot is open already."""
        if self._traits[slot] is not None:
            raise RuntimeError(f"slot {slot} is open already")
        p = state.params
        greedy = p.temperature < GREEDY_BELOW
        penalised = p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0
        top_k = p.top_k if 0 < p.top_k < self.vocab_size else 0
        if not greedy or penalised:
            floats = [p.temperature, p.min_p, p.top_p, p.repetition_penalty, p.frequency_penalty, p.presence_penalty]
            self.floats[slot].copy_(_staged(np.array(floats, np.float32), self.device), non_blocking=True)
            ints = np.array([p.seed, state.choice, top_k], np.int64)
            self.ints[slot].copy_(_staged(ints, self.device), non_blocking=True)
        edits = [*p.logit_bias.items(), *((token, float("-inf")) for token in state.banned_ids)]
        if edits:
            self.edits.set(slot, edits)
        stops_matter = bool(state.stop_ids) and state.min_position > len(state.prompt_ids) + len(state.produced_ids)
        if stops_matter:
            self.stops.set(slot, [(token, float("-inf")) for token in state.stop_ids])
        self._traits[slot] = Traits(
            greedy=greedy,
            top_k=0 if greedy else top_k,
            top_p=not greedy and p.top_p < 1.0,
            min_p=not greedy and p.min_p > 0.0,
            edits=bool(edits),
            stops=stops_matter,
            min_position=state.min_position,
            logprobs=p.logprobs,
            counts_row=self.counts.take(state.prompt_ids, state.produced_ids) if penalised else -1,
        )

    def close(self, slot: int) -> None:
        """RuntimeError if the slot is not open."""
        traits = self.traits(slot)
        if traits.counts_row >= 0:
            self.counts.give_back(traits.counts_row)
        self._traits[slot] = None


def _staged(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device, enqueued from pinned memory where the device is not the host."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
