"""Scheduler and runner in one process without links, and the time that each part takes: what engine benches run."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from engine_proc.blocks import BlockPool
from engine_proc.loader import LoadedModel
from engine_proc.prefix import PrefixCache, PrefixRules
from engine_proc.runner import PendingStep, Runner
from engine_proc.scheduler import Limits, Output, Scheduler, Step
from engine_proc.sequence import Sequence
from wire.messages import Params

SECRET = b"bench"


def greedy(max_tokens: int) -> Params:
    """Nothing but the best id."""
    return Params(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=0,
        max_tokens=max_tokens,
    )


@dataclass
class StepTime:
    """Of one turn of the loop, in seconds. device events are there on CUDA only."""

    rows: int
    wall: float
    plan: float  # choosing the rows
    launch: float  # enqueueing the step
    take: float  # making sense of a step's result
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


@dataclass
class Given:
    """What a sequence was given so far."""

    ids: list[int] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0


class LocalEngine:
    """One rank's loop. `depth`: steps under way while the next one is planned."""

    def __init__(self, loaded: LoadedModel, runner: Runner, chunk: int, max_running: int, depth: int) -> None:
        spec = loaded.model.cache_spec
        self.runner, self.depth = runner, depth
        self.cuda = runner.device.type == "cuda"
        pool = BlockPool(runner.num_blocks, spec.block_tokens)
        prefix = PrefixCache(pool, spec, PrefixRules(SECRET, loaded.digest))
        self.scheduler = Scheduler(pool, prefix, runner, Limits(max_running, chunk, 32))
        self.given: dict[int, Given] = {}
        self.times: list[StepTime] = []
        self._block_tokens = spec.block_tokens
        self.eos_ids = loaded.eos_ids
        self._pending: deque[tuple[Step, PendingStep]] = deque()
        self._sids = 0

    def add(self, prompt: list[int], params: Params, keys: list[bytes] | None = None) -> int:
        """A sequence into the queue; `keys` name its full blocks, for the prefix cache. → its sid."""
        self._sids += 1
        raw = np.array(prompt, np.int32).tobytes()
        sid = self._sids << 8
        sequence = Sequence(
            sid, 0, "", params, raw, keys or [], b"", self.eos_ids, self._block_tokens, time.monotonic()
        )
        self.given[sid] = Given()
        self.scheduler.submit(sequence)
        return sid

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.sequences or self._pending)

    def turn(self) -> None:
        """Plan and launch a step, then take the results that are due."""
        clock = time.perf_counter
        began = clock()
        step = self.scheduler.schedule()
        planned = clock() - began
        launched = taken = 0.0
        events = None
        if step is not None:
            events = self._events()
            before = clock()
            pending = self.runner.launch(step.plan())
            launched = clock() - before
            if events is not None:
                events[1].record()
            self._pending.append((step, pending))
        while self._pending and (step is None or len(self._pending) > self.depth):
            done, pending = self._pending.popleft()
            pending.wait()
            before = clock()
            output = self.scheduler.complete(done, pending.result())
            taken += clock() - before
            self._take(output)
        if step is not None:
            self.times.append(StepTime(len(step.rows), clock() - began, planned, launched, taken, events))

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """Two for the device's time of a step, the first one recorded."""
        if not self.cuda:
            return None
        events = (event(), event())
        events[0].record()
        return events

    def run(self) -> None:
        """Until everything has ended."""
        while self.busy:
            self.turn()

    def _take(self, output: Output) -> None:
        now = time.perf_counter()
        ids = np.frombuffer(output.ids, np.int32).tolist()
        at = 0
        for sequence, count in zip(output.sequences, output.counts, strict=True):
            given = self.given[sequence.sid]
            given.first_at = given.first_at or now
            given.last_at = now
            given.ids += ids[at : at + count]
            at += count


def event() -> torch.cuda.Event:
    """One that can time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not type it
