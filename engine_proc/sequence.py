"""One output that an engine is making: its ids, its place in the pools, and the one table of its states."""

from __future__ import annotations

from array import array
from enum import Enum

import numpy as np
import numpy.typing as npt

from engine_proc.plan import Row, SlotState
from wire.messages import Params, TokenLogprobs, Usage, choice_of

ID_BYTES = 4
NEVER = 1 << 62  # a count of tokens that is not reached


class State(Enum):
    """Where a sequence is in its engine."""

    QUEUED = "queued"  # nothing of it was computed yet
    PREFILL = "prefill"  # has a slot and blocks; known ids are being computed
    DECODE = "decode"  # its last known id is planned: each step gives the next one
    PREEMPTED = "preempted"  # its slot and blocks were taken; it waits to be rebuilt
    FINISHED = "finished"  # by EOS, a stop id or its length
    ABORTED = "aborted"  # somebody asked for its end
    FAILED = "failed"  # an error of its own


ENDS = frozenset({State.ABORTED, State.FAILED})
MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: ENDS | {State.PREFILL, State.FINISHED},  # finished: resumed with nothing left to produce
    State.PREFILL: ENDS | {State.DECODE, State.PREEMPTED},
    State.DECODE: ENDS | {State.PREEMPTED, State.FINISHED},
    State.PREEMPTED: ENDS | {State.PREFILL, State.FINISHED},  # finished: by the id of the step that was in flight
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
}


class IllegalMove(Exception):
    """A fault of the engine itself: a state change that the table does not have."""


class Hooks:
    """Faults that a test has asked for; counts begin at 1, 0 = never."""

    __slots__ = ("fail_step", "nan_step", "steps", "width")

    def __init__(self, wishes: dict[str, object]) -> None:
        """Raises ValueError for values that are no counts."""
        self.nan_step, self.fail_step = _count(wishes, "nan_step"), _count(wishes, "fail_step")
        self.width = max(1, _count(wishes, "tokens_per_step"))
        self.steps = 0  # in which it had a row


def _count(wishes: dict[str, object], name: str) -> int:
    value = wishes.get(name, 0)
    if type(value) is not int or value < 0:
        raise ValueError(f"the hook {name} must be a count")
    return value


class Sequence:
    """Ids and bookkeeping. The scheduler alone changes `state`, `slot`, blocks and plan.

    A token is computed when its K and V are in the sequence's blocks. `planned` counts leading tokens that are
    computed once all launched steps have completed; a decode row computes token `planned` and samples the one after.
    """

    __slots__ = (
        "arrived",
        "attempt",
        "awaits",
        "banned",
        "border",
        "bypassed",
        "cacheable",
        "chain",
        "claims",
        "end",
        "ended",
        "entered",
        "found",
        "held",
        "hooks",
        "keys",
        "last_step",
        "left",
        "order",
        "params",
        "planned",
        "produced",
        "prompt",
        "prompt_raw",
        "prompt_tokens",
        "records",
        "row",
        "sid",
        "slot",
        "state",
        "stop_at",
        "stops",
        "table",
        "tenant",
        "usage",
    )

    def __init__(
        self,
        sid: int,
        attempt: int,
        tenant: str,
        params: Params,
        prompt: bytes,
        keys: list[bytes],
        produced: bytes,
        eos_ids: list[int],
        block_tokens: int,
        arrived: float,
    ) -> None:
        """prompt, produced: int32 little-endian; keys: of leading full blocks; arrived: monotonic seconds."""
        self.sid, self.attempt, self.tenant, self.params = sid, attempt, tenant, params
        self.prompt_raw = prompt
        self.prompt: npt.NDArray[np.int32] = np.frombuffer(prompt, np.int32)
        self.prompt_tokens = len(self.prompt)
        self.keys = keys  # grows with the blocks that fill
        self.produced = array("i")
        self.produced.frombytes(produced)
        self.records: list[TokenLogprobs] = []  # logprobs of what this engine has produced, if asked for
        self.banned = list(eos_ids) if params.ignore_eos else []
        self.stops = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_ids)
        self.left = params.max_tokens - len(self.produced)  # ids until its length ends it
        self.end = self.prompt_tokens + params.max_tokens - 1  # tokens that are ever computed
        self.hooks: Hooks | None = Hooks(params.hooks) if params.hooks else None

        self.state, self.ended = State.QUEUED, False
        self.arrived, self.order, self.bypassed = arrived, 0, 0
        self.usage: Usage | None = None  # of the first admission
        self.slot, self.last_step = -1, 0  # last_step: number of the last launched step with a row of it
        self.table: npt.NDArray[np.int32] = np.zeros(-(-(self.end + 1) // block_tokens), np.int32)
        self.held = 0  # blocks at the table's start that it has a reference to
        self.planned = self.stop_at = 0  # no decode row starts at or above stop_at without a look at the sequence
        self.row = Row(-1, 0, 1, None, self.table, True)  # its decode row, reused in every step
        self.cacheable = params.prefix_cache
        self.entered, self.border, self.chain = 0, NEVER, 0  # see `prefix`
        self.claims: list[bytes] = []  # keys of blocks that only this sequence is computing
        self.awaits = b""  # key of a block that another one was computing when this one was last looked at
        self.found = 0  # produced ids when it was last admitted: more of them show that its prefill has completed

    def move(self, state: State) -> None:
        """Raises IllegalMove when the table does not have it."""
        if state not in MOVES[self.state]:
            raise IllegalMove(f"{self.state.value} → {state.value}")
        self.state = state
        self.ended = not MOVES[state]

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows: prompt and produced."""
        return self.prompt_tokens + len(self.produced)

    def ids(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Known ids at positions [start, end): a view where they lie in one part, as chunks always do."""
        if end <= self.prompt_tokens:
            return self.prompt[start:end]
        produced = np.array(self.produced[max(0, start - self.prompt_tokens) : end - self.prompt_tokens], np.int32)
        return produced if start >= self.prompt_tokens else np.concatenate((self.prompt[start:], produced))

    def raw(self, start: int, end: int) -> bytes:
        """The same as bytes."""
        if end <= self.prompt_tokens:
            return self.prompt_raw[ID_BYTES * start : ID_BYTES * end]
        return self.ids(start, end).tobytes()

    def slot_state(self) -> SlotState:
        """What a runner needs to go on with it from here."""
        return SlotState(
            params=self.params,
            choice=choice_of(self.sid),
            prompt_ids=self.prompt,
            produced_ids=np.array(self.produced, np.int32),
            banned_ids=self.banned,
            stop_ids=sorted(self.stops),
            min_position=self.prompt_tokens + self.params.min_tokens,
        )
