"""A scheduler with a runner that remembers what lies in every block, so that any wrong block gives other ids.

The fake device keeps for each (block, offset) a digest of the whole prefix up to that token. A row reads the digests
of everything before it through its block table, as attention would, and its next id follows from all of them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_proc.blocks import BlockPool
from engine_proc.cache_spec import CacheSpec
from engine_proc.plan import Logprobs, Row, SlotState, StepPlan, StepResult
from engine_proc.prefix import PrefixCache, PrefixRules
from engine_proc.scheduler import Limits, Output, Scheduler, Step
from engine_proc.sequence import Sequence
from wire.keys import block_keys, root_key
from wire.messages import Finished, Params

SECRET, DIGEST = b"s" * 32, "d" * 64
VOCABULARY, EOS = 1000, 2
EMPTY = -1
Ids = npt.NDArray[np.int64]


def params(max_tokens: int = 8, **changes: Any) -> Params:
    """Greedy, nothing else."""
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 1,
        "max_tokens": max_tokens,
    }
    return Params(**{**fields, **changes})


def spec(block_tokens: int = 4, keep_tokens: int = 1) -> CacheSpec:
    return CacheSpec(1, block_tokens, (block_tokens * 4,), "fake", keep_tokens)


def mix(digest: int, value: int) -> int:
    return (digest * 6364136223846793005 + value * 1442695040888963407 + 1) & ((1 << 62) - 1)


@dataclass
class FakeStep:
    """Copies of what the runner got: as on a device, the table may change after the launch."""

    runner: FakeRunner
    rows: list[tuple[Row, npt.NDArray[np.int32], SlotState]]
    found: StepResult | None = None

    def result(self) -> StepResult:
        """Work is done as late as allowed."""
        while self.found is None:
            first = self.runner.queue.popleft()
            first.found = self.runner.run(first)
        return self.found


class FakeRunner:
    """`next_id(digest of the prefix, position)` is the model. Counts what it is asked."""

    def __init__(
        self, num_blocks: int, block_tokens: int, max_running: int, next_id: Callable[[int], int] | None = None
    ) -> None:
        self.size = block_tokens
        self.memory = np.full((num_blocks, block_tokens), EMPTY, np.int64)
        self.last = [EMPTY] * max_running
        self.open: dict[int, SlotState] = {}
        self.queue: deque[FakeStep] = deque()
        self.next_id = next_id or (lambda digest: 3 + digest % (VOCABULARY - 3))
        self.computed = 0  # tokens
        self.largest = 0  # tokens in one step
        self.fail_open = False

    def open_slot(self, slot: int, state: SlotState) -> None:
        if self.fail_open:
            self.fail_open = False
            raise ValueError("this slot does not open")
        assert slot not in self.open
        self.open[slot] = state

    def close_slot(self, slot: int) -> None:
        del self.open[slot]

    def launch(self, plan: StepPlan) -> FakeStep:
        assert plan.tokens == sum(row.count for row in plan.rows)
        kinds = [row.ids is None for row in plan.rows]
        assert kinds == sorted(kinds, reverse=True), "decode rows come first"
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), "two rows of one sequence"
        assert set(slots) <= set(self.open)
        self.largest = max(self.largest, plan.tokens)
        copies = [
            (
                Row(r.slot, r.start, r.count, r.ids, r.blocks, r.sample, r.nan_logits),
                r.blocks.copy(),
                self.open[r.slot],
            )
            for r in plan.rows
        ]
        step = FakeStep(self, copies)
        self.queue.append(step)
        return step

    def run(self, step: FakeStep) -> StepResult:
        ids: list[int] = []
        finite: list[bool] = []
        logprobs: dict[int, Logprobs] = {}
        for row, table, state in step.rows:
            digest = self._forward(row, table)
            if not row.sample:
                continue
            token = self.next_id(digest)
            if row.nan_logits:
                token = 0
            self.last[row.slot] = token
            if state.params.logprobs >= 0 and not row.nan_logits:
                logprobs[len(ids)] = Logprobs(-token / 1000, [token], [-token / 1000])
            ids.append(token)
            finite.append(not row.nan_logits)
        return StepResult(np.array(ids, np.int32), np.array(finite, np.bool_), logprobs)

    def _forward(self, row: Row, table: npt.NDArray[np.int32]) -> int:
        """Write the row's tokens; → digest of everything that its last token attends to."""
        size, end = self.size, row.start + row.count
        positions = np.arange(end)
        blocks, offsets = table[positions // size], positions % size
        before: Ids = self.memory[blocks[: row.start], offsets[: row.start]]
        assert not (before == EMPTY).any(), "a row reads what nobody has written"
        digest = int(before[-1]) if row.start else 0
        tokens = [self.last[row.slot]] if row.ids is None else row.ids.tolist()
        self.computed += len(tokens)
        for index, token in enumerate(tokens):
            digest = mix(digest, token)
            self.memory[blocks[row.start + index], offsets[row.start + index]] = digest
        return int(np.bitwise_xor.reduce(self.memory[blocks, offsets])) & ((1 << 62) - 1)


def expected(prompt: list[int], count: int, next_id: Callable[[int], int] | None = None) -> list[int]:
    """What a sequence must produce, computed without blocks."""
    rule = next_id or (lambda digest: 3 + digest % (VOCABULARY - 3))
    digest = together = 0
    for token in prompt:
        digest = mix(digest, token)
        together ^= digest
    found: list[int] = []
    while len(found) < count:
        found.append(rule(together))
        digest = mix(digest, found[-1])
        together ^= digest
    return found


@dataclass
class World:
    """A scheduler, its fake runner, and everything that came out of it. `depth` as in the loop."""

    num_blocks: int = 64
    max_running: int = 8
    chunk: int = 32
    max_bypass: int = 32
    depth: int = 0
    block_tokens: int = 4
    keep_tokens: int = 1
    key_bits: int = 256
    prefix_cache: bool = True
    check: bool = True
    next_id: Callable[[int], int] | None = None
    ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.num_blocks, self.block_tokens, self.max_running, self.next_id)
        self.pool = BlockPool(self.num_blocks, self.block_tokens)
        rules = PrefixRules(SECRET, DIGEST, self.prefix_cache, False, self.key_bits)
        self.spec = spec(self.block_tokens, self.keep_tokens)
        self.prefix = PrefixCache(self.pool, self.spec, rules)
        limits = Limits(self.max_running, self.chunk, self.max_bypass)
        self.scheduler = Scheduler(self.pool, self.prefix, self.runner, limits)
        self.pending: deque[tuple[Step, FakeStep]] = deque()
        self._sid = 0

    def sequence(
        self, prompt: list[int], wish: Params | None = None, produced: list[int] | None = None, tenant: str = ""
    ) -> Sequence:
        self._sid += 1
        raw = np.array(prompt, np.int32).tobytes()
        root = root_key(SECRET, DIGEST, self.spec.cache_format, tenant)
        return Sequence(
            self._sid << 8,
            0,
            tenant,
            wish or params(),
            raw,
            block_keys(root, raw, self.block_tokens, self.key_bits),
            np.array(produced or [], np.int32).tobytes(),
            [EOS],
            self.block_tokens,
            0.0,
        )

    def add(
        self, prompt: list[int], wish: Params | None = None, produced: list[int] | None = None, tenant: str = ""
    ) -> Sequence:
        sequence = self.sequence(prompt, wish, produced, tenant)
        self.ids[sequence.sid] = list(produced or [])
        self.scheduler.submit(sequence)
        return sequence

    def turn(self) -> bool:
        """One turn of the loop; False when nothing is left to do."""
        scheduler = self.scheduler
        step = scheduler.schedule()
        if step is not None:
            self.pending.append((step, self.runner.launch(step.plan())))
        elif not self.pending:
            assert not scheduler.sequences, "no progress"
        while self.pending and (step is None or len(self.pending) > self.depth):
            done, fake = self.pending.popleft()
            self._take(scheduler.complete(done, fake.result()))
        for finished in scheduler.take_finished():
            self._finish(finished)
        if self.check:
            scheduler.check()
        return bool(scheduler.sequences or self.pending)

    def _take(self, output: Output) -> None:
        self.outputs.append(output)
        ids = np.frombuffer(output.ids, np.int32).tolist()
        assert len(ids) == sum(output.counts)
        for sequence, count in zip(output.sequences, output.counts, strict=True):
            assert sequence.sid not in self.ends, "ids after the end"
            self.ids[sequence.sid] += ids[:count]
            ids = ids[count:]
        for finished in output.finished:
            self._finish(finished)

    def _finish(self, finished: Finished) -> None:
        assert finished.sid not in self.ends, "two ends"
        assert finished.completion_tokens == len(self.ids[finished.sid])
        self.ends[finished.sid] = finished

    def run(self, most: int = 100_000) -> None:
        """Until nothing is left."""
        for _ in range(most):
            if not self.turn():
                break
        else:
            raise AssertionError("it does not end")
        self.idle()

    def idle(self) -> None:
        """The idle invariant."""
        self.scheduler.check()
        counts = self.pool.counts()
        assert counts.pinned == 0 and counts.free + counts.cached == counts.total, counts
        assert not self.runner.open and not self.scheduler.sequences

    def reasons(self) -> list[str]:
        return [end.reason for end in self.ends.values()]


def prompt_of(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(length)]
