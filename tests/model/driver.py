"""Runs sequences on a Runner without a scheduler: a test plans rows itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine_proc.plan import Logprobs, Row, SlotState, StepPlan, StepResult
from engine_proc.runner import Runner
from wire.messages import Params

Ids = Sequence[int] | npt.NDArray[np.int32]


def params(**changes: object) -> Params:
    """Greedy, without filters or penalties, changed as asked."""
    fields: dict[str, object] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "max_tokens": 16,
    }
    return Params(**(fields | changes))  # type: ignore[arg-type]  # the tests name fields by keyword


def state(prompt: Ids, wish: Params | None = None, choice: int = 0, produced: Ids = (), **changes: object) -> SlotState:
    """A slot's state with nothing banned, changed as asked."""
    fields: dict[str, object] = {"banned_ids": [], "stop_ids": [], "min_position": 0}
    return SlotState(
        params=wish or params(),
        choice=choice,
        prompt_ids=np.asarray(prompt, np.int32),
        produced_ids=np.asarray(produced, np.int32),
        **(fields | changes),  # type: ignore[arg-type]  # as above
    )


class Sequenced:
    """One sequence in a slot, with blocks of its own or given ones."""

    def __init__(self, driver: Driver, slot: int, slot_state: SlotState, blocks: Ids, cached: int = 0) -> None:
        self.driver = driver
        self.slot = slot
        self.prompt = slot_state.prompt_ids
        self.rebuilt = slot_state.produced_ids
        self.blocks = np.asarray(blocks, np.int32)
        self.at = cached  # tokens whose K and V are in the blocks
        self.ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        driver.runner.open_slot(slot, slot_state)

    def row(self, chunk: int) -> Row:
        """The next row: a chunk of what is known, or a decode row."""
        known = np.concatenate((self.prompt, self.rebuilt))
        if self.at >= len(known):
            row = Row(self.slot, self.at, 1, None, self.blocks, True)
        else:
            end = min(self.at + chunk, len(known))
            if self.at < len(self.prompt):  # the prompt and the produced ids are rebuilt in two parts
                end = min(end, len(self.prompt))
            row = Row(self.slot, self.at, end - self.at, known[self.at : end], self.blocks, end == len(known))
        self.at += row.count
        return row


class Driver:
    """Gives out slots and blocks and runs steps until each sequence has its tokens."""

    def __init__(self, runner: Runner, shuffle_seed: int | None = None) -> None:
        self.runner = runner
        self.size = runner.model.cache_spec.block_tokens
        self.free = list(range(runner.num_blocks))[::-1]
        if shuffle_seed is not None:
            np.random.default_rng(shuffle_seed).shuffle(self.free)
        self._slots = 0

    def start(self, slot_state: SlotState, tokens: int, prefix: Ids = (), cached: int = 0) -> Sequenced:
        """A sequence that will produce `tokens` more ids; `prefix` are blocks that hold its first `cached` tokens."""
        total = len(slot_state.prompt_ids) + len(slot_state.produced_ids) + tokens
        count = -(-total // self.size) - len(prefix)
        blocks = [*prefix, *(self.free.pop() for _ in range(count))]
        self._slots += 1
        return Sequenced(self, self._slots - 1, slot_state, blocks, cached)

    def stop(self, sequences: Sequence[Sequenced]) -> None:
        for sequence in sequences:
            self.runner.close_slot(sequence.slot)
            self.free.extend(int(block) for block in sequence.blocks)
        self._slots -= len(sequences)

    def step(self, rows: list[Row], deterministic: bool = False) -> StepResult:
        rows = sorted(rows, key=lambda row: row.ids is not None)
        return self.runner.launch(StepPlan(rows, sum(row.count for row in rows), deterministic)).result()

    def run(
        self, sequences: Sequence[Sequenced], tokens: int, chunk: int = 1 << 30, deterministic: bool = False
    ) -> None:
        """All sequences together until each has `tokens` ids."""
        while live := [sequence for sequence in sequences if len(sequence.ids) < tokens]:
            rows = [sequence.row(chunk) for sequence in live]
            rows.sort(key=lambda row: row.ids is not None)
            owners = {sequence.slot: sequence for sequence in live}
            result = self.step(rows, deterministic)
            sampled = [row for row in rows if row.sample]
            assert result.finite.all()
            for index, (row, found) in enumerate(zip(sampled, result.ids.tolist(), strict=True)):
                owners[row.slot].ids.append(found)
                if index in result.logprobs:
                    owners[row.slot].logprobs.append(result.logprobs[index])
