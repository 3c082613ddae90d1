"""What the scheduler asks of the runner: one step, as rows. The border between control and compute.

The control side (scheduler, blocks, sequences, loop) never touches a tensor; the compute side (runner, sampler,
attention, models) never touches a queue. A running sequence owns a `slot` (0..max_running-1): its row in the
runner's persistent device state (last sampled id, sampling state). Sampled ids stay on the device under their slot
and feed the next step, so that step n+1 can be planned while step n runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wire.messages import Params


@dataclass(slots=True)
class Row:
    """`count` tokens of one sequence, at positions [start, start + count), in one step.

    ids: int32 [count], or None for a decode row (count == 1) whose input id is the last one sampled in its slot.
    blocks: int32 [>= ceil((start + count) / block_tokens)], the sequence's block table (a view, not changed while
    the step runs). sample: whether a next id is sampled after the last token of this row; decode rows always sample.
    nan_logits: test hook, makes the sampled row's logits non-finite.
    A row may be used again for a later step: its fields are read while the step is launched, not afterwards.
    """

    slot: int
    start: int
    count: int
    ids: npt.NDArray[np.int32] | None
    blocks: npt.NDArray[np.int32]
    sample: bool
    nan_logits: bool = False


@dataclass(slots=True)
class StepPlan:
    """Rows of one step: decode rows (ids None) first, then prefill rows."""

    rows: list[Row]
    tokens: int  # sum of counts
    deterministic: bool = False


@dataclass(slots=True)
class Logprobs:
    """Of one sampled id: natural log of the model's own distribution (before temperature, penalties and filters)."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class Further:
    """Ids that one row gives after its first, from a model that yields several a step; a record each, if asked for."""

    ids: list[int]
    logprobs: list[Logprobs] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """One entry per row with `sample`, in row order."""

    ids: npt.NDArray[np.int32]
    finite: npt.NDArray[np.bool_]  # False: the row's logits were not finite; its id means nothing
    logprobs: dict[int, Logprobs] = field(default_factory=dict)  # index in `ids` -> record, where asked for
    further: dict[int, Further] = field(default_factory=dict)  # index in `ids` -> ids after it, where there are some


@dataclass(slots=True)
class SlotState:
    """What `Runner.open_slot` gets when a sequence starts, resumes or is rebuilt after preemption.

    Penalties count `prompt_ids` and `produced_ids` (repetition: both; presence and frequency: produced only).
    Sampling of the id at absolute position p uses the counter-based generator keyed by (params.seed, choice, p).
    `banned_ids` get probability 0 always (ignore_eos); `stop_ids` get probability 0 at positions below
    `min_position` = prompt length + min_tokens.
    """

    params: Params
    choice: int
    prompt_ids: npt.NDArray[np.int32]
    produced_ids: npt.NDArray[np.int32]
    banned_ids: list[int]
    stop_ids: list[int]
    min_position: int
