"""Runs steps: builds the batch of a plan, enqueues forward pass and sampling, and hands back the result later.

`launch` never waits for the device. Ids sampled for a slot stay on the device in `last_id` and feed the slot's next
decode row, so a step may be launched before the former one's ids are known on the host.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine_proc.attention.base import Capturable, Room
from engine_proc.attention.registry import make_backend
from engine_proc.captured import CapturedSteps, DecodeStep, MixedStep
from engine_proc.loader import LoadedModel
from engine_proc.plan import Logprobs, Row, SlotState, StepPlan, StepResult
from engine_proc.sampler import Sampled, Sampler
from engine_proc.slots import SlotTable
from engine_proc.upload import Upload


class PendingStep:
    """A step that was enqueued. Its buffers are its own, so any number of steps may be pending."""

    def __init__(
        self,
        device: torch.device,
        sampled: Sampled | None,
        order: npt.NDArray[np.int64] | None,
        wanted: dict[int, int],
    ) -> None:
        """`order[i]`: place in the result of sampled row i (None: i). `wanted`: row → alternatives, where asked for."""
        self._order = order
        self._wanted = wanted
        self._event: torch.Event | None = None
        self._ids: torch.Tensor | None = None
        self._logprobs: torch.Tensor | None = None
        self._top_ids: torch.Tensor | None = None
        if sampled is not None:
            self._ids = _to_host(torch.stack((sampled.ids, sampled.finite.to(torch.int64))))
            self._logprobs = None if sampled.logprobs is None else _to_host(sampled.logprobs)
            self._top_ids = None if sampled.top_ids is None else _to_host(sampled.top_ids)
        if device.type == "cuda":  # also without samples: the result says that blocks are no longer touched
            self._event = torch.Event(device)
            self._event.record()

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Until the step is done (on the CPU it is already)."""
        if self._event is not None:
            self._event.synchronize()

    def result(self) -> StepResult:
        """Waits for the step."""
        self.wait()
        if self._ids is None:
            return StepResult(np.empty(0, np.int32), np.empty(0, np.bool_))
        found = self._ids.numpy()
        ids, finite = found[0].astype(np.int32), found[1].astype(np.bool_)
        if self._order is not None:
            ids[self._order], finite[self._order] = ids.copy(), finite.copy()
        return StepResult(ids, finite, self._records(finite))

    def _records(self, finite: npt.NDArray[np.bool_]) -> dict[int, Logprobs]:
        if self._logprobs is None:
            return {}
        values = self._logprobs.tolist()
        tops = self._top_ids.tolist() if self._top_ids is not None else [[]] * len(values)
        found: dict[int, Logprobs] = {}
        for (row, count), value, top in zip(self._wanted.items(), values, tops, strict=True):
            place = row if self._order is None else int(self._order[row])
            if finite[place]:
                found[place] = Logprobs(value[0], top[:count], value[1 : 1 + count])
        return found


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Enqueues the copy into pinned memory."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Runner:
    """One model on one device, with its blocks and slots."""

    @torch.inference_mode()
    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        max_running: int,
        attention: str = "auto",
        cuda_graphs: bool = True,
    ) -> None:
        """Allocates the blocks (num_blocks * cache_spec.block_bytes() bytes) and the state of `max_running` slots.

        `attention` names a backend, see `attention.registry`. With cuda_graphs, steps that can be captured are.
        """
        self.model = loaded.model
        self.device = self.model.device
        self.num_blocks = num_blocks
        room = Room(self.model.config.attention, num_blocks, max_running, loaded.context_length)
        self.backend = make_backend(attention, room, self.device, self.model.dtype)
        self._table = SlotTable(max_running, loaded.vocab_size, self.device)
        self._sampler = Sampler(self._table)
        self._last_id = torch.zeros(max_running + 1, dtype=torch.int64, device=self.device)
        self._captured: CapturedSteps | None = None
        if isinstance(self.backend, Capturable):
            self._captured = CapturedSteps(self.model, self.backend, self._last_id, max_running, cuda_graphs)

    @torch.inference_mode()
    def open_slot(self, slot: int, state: SlotState) -> None:
        """A sequence takes a free slot; its sampling state is made from its ids so far."""
        self._table.open(slot, state)
        self.backend.open_slot(slot)

    def close_slot(self, slot: int) -> None:
        """The slot is free; a row of it may still be in flight."""
        self._table.close(slot)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Enqueues the step. With `plan.deterministic` each row has a forward pass of its own, as if it were alone."""
        rows, order = _in_batch_order(plan.rows) if self._captured is None else (plan.rows, None)
        upload = Upload(self.device)
        batches = [[row] for row in rows] if plan.deterministic else [rows] if rows else []
        parts = [self._part(batch, upload) for batch in batches]
        sampled_rows = [row for row in rows if row.sample]
        slots = np.array([row.slot for row in sampled_rows], np.int64)
        positions = np.array([row.start + row.count for row in sampled_rows], np.int64)
        poisoned = [index for index, row in enumerate(sampled_rows) if row.nan_logits]
        sampling = self._sampler.plan(slots, positions, poisoned, upload)
        sampled_slots = upload.add(slots)
        upload.send()
        found = [computed for part in parts if (computed := _run(part, alone=len(parts) == 1)) is not None]
        if not found:
            return PendingStep(self.device, None, order, {})
        logits, best = found[0] if len(found) == 1 else (torch.cat([each for each, _ in found]), None)
        sampled = self._sampler.sample(logits, sampling, best)
        self._last_id.index_copy_(0, sampled_slots.tensor, sampled.ids)
        return PendingStep(self.device, sampled, order, sampling.wanted)

    def _part(self, rows: list[Row], upload: Upload) -> _Forward | DecodeStep | MixedStep:
        captured = None if self._captured is None else self._captured.part(rows, upload)
        return captured or _Forward(self, rows, upload)

    def last_ids(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n] → the ids last sampled in these slots."""
        return self._last_id.index_select(0, slots)


class _Forward:
    """One forward pass over some rows: decode rows first."""

    def __init__(self, runner: Runner, rows: list[Row], upload: Upload) -> None:
        self._runner = runner
        decode = [row for row in rows if row.ids is None]
        given = [row.ids for row in rows if row.ids is not None]
        self._slots = upload.add([row.slot for row in decode]) if decode else None
        self._ids = upload.add(np.concatenate(given)) if given else None
        starts = np.array([row.start for row in rows])
        counts = np.array([row.count for row in rows])
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        self._positions = upload.add(positions)
        self._attention = runner.backend.prepare(rows, upload)
        samples = [end - 1 for row, end in zip(rows, ends.tolist(), strict=True) if row.sample]
        self._samples = len(samples)
        all_of_them = len(samples) == len(positions)
        self._sample_rows = None if all_of_them else upload.add(samples)

    def run(self) -> tuple[torch.Tensor, Sampled | None] | None:
        """Logits fp32 [sampled rows, V], or None if no row samples."""
        ids: list[torch.Tensor] = []
        if self._slots is not None:
            ids.append(self._runner.last_ids(self._slots.tensor))
        if self._ids is not None:
            ids.append(self._ids.tensor)
        rows = None if self._sample_rows is None else self._sample_rows.tensor
        model = self._runner.model
        hidden = model.forward(
            ids[0] if len(ids) == 1 else torch.cat(ids), self._positions.tensor, self._attention, rows
        )
        return (model.logits(hidden), None) if self._samples else None


def _run(part: _Forward | DecodeStep | MixedStep, alone: bool) -> tuple[torch.Tensor, Sampled | None] | None:
    """The part's logits; if it is not alone, in memory that the next part does not use again."""
    computed = part.run()
    return computed if computed is None or alone else (computed[0].clone(), None)


def _in_batch_order(planned: list[Row]) -> tuple[list[Row], npt.NDArray[np.int64]]:
    """Decode rows by rising context length, so that attention can group neighbours; then prefill rows.

    Also for each sampled row of the batch: its place among the plan's rows that sample.
    """
    decode = sum(row.ids is None for row in planned)
    by_length = sorted(range(decode), key=lambda index: planned[index].start)
    places = np.cumsum([row.sample for row in planned]) - 1
    batch = [*by_length, *range(decode, len(planned))]
    return [planned[index] for index in batch], places[[index for index in batch if planned[index].sample]]
