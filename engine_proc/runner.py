"""Runs steps: builds the batch of a plan, enqueues forward pass and sampling, and hands back the result later.

`launch` never waits for the device. Ids sampled for a slot stay on the device in `last_id` and feed the slot's next
decode row, so a step may be launched before the former one's ids are known on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from engine_proc.attention.base import Capturable, Room
from engine_proc.attention.registry import make_backend
from engine_proc.batch import Batch, Numbers
from engine_proc.captured import CapturedSteps, Computed, DecodeStep, MixedStep
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
        self._packed: torch.Tensor | None = None
        self._logprobs: torch.Tensor | None = None
        self._top_ids: torch.Tensor | None = None
        if sampled is not None:
            self._packed = _to_host(sampled.packed)
            self._logprobs = None if sampled.logprobs is None else _to_host(sampled.logprobs)
            self._top_ids = None if sampled.top_ids is None else _to_host(sampled.top_ids)
        if device.type == "cuda":  # also without samples: the result says that blocks are no longer touched
            self._event = torch.Event(device)
            self._event.record()

    def wait(self) -> None:
        """Until the step is done (on the CPU it is already)."""
        if self._event is not None:
            self._event.synchronize()

    def result(self) -> StepResult:
        """Waits for the step."""
        self.wait()
        if self._packed is None:
            return StepResult(np.empty(0, np.int32), np.empty(0, np.bool_))
        found = self._packed.numpy()
        ids, finite = found[:, 0].astype(np.int32), found[:, 1].astype(np.bool_)
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
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Allocates the blocks (num_blocks * cache_spec.block_bytes() bytes) and the state of `max_running` slots.

        `attention` names a backend, see `attention.registry`. With cuda_graphs, steps that can be captured are;
        progress(done, total) counts them.
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
            self._captured = CapturedSteps(self.model, self.backend, self._last_id, max_running, cuda_graphs, progress)

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
        batches = [
            Batch.of(part) for part in ([[row] for row in rows] if plan.deterministic else [rows] if rows else [])
        ]
        parts = [self._part(batch, upload) for batch in batches]
        slots, positions, poisoned = _sampled(rows, batches)
        sampling = self._sampler.plan(slots, positions, poisoned, upload)
        alone = len(parts) == 1
        sampled_slots = None if alone and isinstance(parts[0], DecodeStep) else upload.add(slots)
        upload.send()
        found = [computed for part in parts if (computed := _run(part, alone)) is not None]
        if not found:
            return PendingStep(self.device, None, order, {})
        all_found = found[0] if alone else Computed(torch.cat([each.logits for each in found]))
        sampled = self._sampler.sample(all_found.logits, sampling, all_found.best)
        target = all_found.slots if sampled_slots is None else sampled_slots.tensor
        assert target is not None
        self._last_id.index_copy_(0, target, sampled.ids)
        return PendingStep(self.device, sampled, order, sampling.wanted)

    def _part(self, batch: Batch, upload: Upload) -> _Forward | DecodeStep | MixedStep:
        captured = None if self._captured is None else self._captured.part(batch, upload)
        return captured or _Forward(self, batch, upload)

    def last_ids(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n] → the ids last sampled in these slots."""
        return self._last_id.index_select(0, slots)


class _Forward:
    """One forward pass, a launch for each operation."""

    def __init__(self, runner: Runner, batch: Batch, upload: Upload) -> None:
        self._runner = runner
        given = batch.given()
        self._slots = upload.add(batch.slots[: batch.decode]) if batch.decode else None
        self._ids = upload.add(given) if len(given) else None
        self._positions = upload.add(batch.positions())
        self._attention = runner.backend.prepare(batch, upload)
        samples = batch.sampled_tokens()
        self._samples = len(samples)
        self._sample_rows = None if len(samples) == batch.tokens else upload.add(samples)

    def run(self) -> Computed | None:
        """None if no row samples."""
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
        return Computed(model.logits(hidden)) if self._samples else None


def _run(part: _Forward | DecodeStep | MixedStep, alone: bool) -> Computed | None:
    """What the part finds; if it is not alone, in memory that the next part does not use again."""
    computed = part.run()
    return computed if computed is None or alone else Computed(computed.logits.clone())


def _sampled(rows: list[Row], batches: list[Batch]) -> tuple[Numbers, Numbers, list[int]]:
    """Of the rows that sample: slots, positions of the ids to come, and which of them a test hook makes non-finite."""
    if len(batches) == 1 and batches[0].decode == len(rows):
        slots, positions, sampled = batches[0].slots, batches[0].starts + 1, rows
    else:
        sampled = [row for row in rows if row.sample]
        slots = np.array([row.slot for row in sampled], np.int64)
        positions = np.array([row.start + row.count for row in sampled], np.int64)
    return slots, positions, [index for index, row in enumerate(sampled) if row.nan_logits]


def _in_batch_order(planned: list[Row]) -> tuple[list[Row], npt.NDArray[np.int64]]:
    """Decode rows by rising context length, so that attention can group neighbours; then prefill rows.

    Also for each sampled row of the batch: its place among the plan's rows that sample.
    """
    decode = sum(row.ids is None for row in planned)
    by_length = sorted(range(decode), key=lambda index: planned[index].start)
    places = np.cumsum([row.sample for row in planned]) - 1
    batch = [*by_length, *range(decode, len(planned))]
    return [planned[index] for index in batch], places[[index for index in batch if planned[index].sample]]
