"""What the sampler keeps per slot: on the device its parameters, edits and counts, on the host traits that steer it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine_proc.plan import SlotState

GREEDY_BELOW = 1e-5  # temperatures below are greedy: their quotients would leave fp32's useful range

# columns of SlotTable.floats and SlotTable.ints
TEMPERATURE, MIN_P, TOP_P, REPETITION, FREQUENCY, PRESENCE = range(6)
SEED, CHOICE, TOP_K = range(3)


class Traits:
    """What the host must know of slots to choose the work of a step: one array per trait, indexed by slot."""

    def __init__(self, slots: int) -> None:
        self.open = np.zeros(slots, np.bool_)
        self.drawn = np.zeros(slots, np.bool_)  # not greedy
        self.top_k = np.zeros(slots, np.int64)  # 0 = off
        self.top_p = np.zeros(slots, np.bool_)
        self.min_p = np.zeros(slots, np.bool_)
        self.edits = np.zeros(slots, np.bool_)  # has biased or banned ids
        self.stops_below = np.zeros(slots, np.int64)  # the position from which its stop ids are allowed
        self.logprobs = np.full(slots, -1, np.int64)  # -1 = none, else number of alternatives
        self.counts_row = np.full(slots, -1, np.int64)  # row in PenaltyCounts, -1 = no penalties


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
        self.traits = Traits(max_running)

    def open(self, slot: int, state: SlotState) -> None:
        """RuntimeError if the slot is open already."""
        traits = self.traits
        if traits.open[slot]:
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
        traits.drawn[slot] = not greedy
        traits.top_k[slot] = 0 if greedy else top_k
        traits.top_p[slot] = not greedy and p.top_p < 1.0
        traits.min_p[slot] = not greedy and p.min_p > 0.0
        traits.edits[slot] = bool(edits)
        traits.stops_below[slot] = state.min_position if stops_matter else 0
        traits.logprobs[slot] = p.logprobs
        traits.counts_row[slot] = self.counts.take(state.prompt_ids, state.produced_ids) if penalised else -1
        traits.open[slot] = True

    def close(self, slot: int) -> None:
        """RuntimeError if the slot is not open."""
        if not self.traits.open[slot]:
            raise RuntimeError(f"slot {slot} is not open")
        row = int(self.traits.counts_row[slot])
        if row >= 0:
            self.counts.give_back(row)
        self.traits.open[slot] = False


def _staged(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device, enqueued from pinned memory where the device is not the host."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
