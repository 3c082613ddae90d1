"""Which sequences run in the next step, and what its result means for them. Knows no device, no socket and no clock.

A step has decode rows first, then chunks of known ids under the token budget. A step may be planned while the one
before it runs (see `plan`): `planned` of a sequence is ahead of what is known then, a row found finished may run
once more for nothing, and a preempted sequence keeps the id of the step in flight.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine_proc.blocks import BlockPool
from engine_proc.plan import Further, Logprobs, Row, SlotState, StepPlan, StepResult
from engine_proc.prefix import Hit, PrefixCache
from engine_proc.sequence import Sequence, State
from wire.messages import Finished, SequenceLogprobs, TokenLogprobs, Usage

NOT_LOOKED = (-1, -1)

log = logging.getLogger("deepinfer.engine")


class Slots(Protocol):
    """The part of a runner that holds state per running sequence."""

    def open_slot(self, slot: int, state: SlotState) -> None: ...
    def close_slot(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a step and of the running set; see the flags of the same names."""

    max_running: int
    prefill_chunk_tokens: int
    max_bypass: int


@dataclass(slots=True)
class Step:
    """A planned step, as its result will need it."""

    number: int
    rows: list[Row] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)  # owners of the rows that sample, in row order
    filled: list[tuple[Sequence, int]] = field(default_factory=list)  # tokens computed when this step has completed
    prefill_tokens: int = 0
    hooked: list[Sequence] = field(default_factory=list)

    def plan(self) -> StepPlan:
        decoding = len(self.rows) if not self.prefill_tokens else sum(row.ids is None for row in self.rows)
        return StepPlan(self.rows, decoding + self.prefill_tokens)


@dataclass(slots=True)
class Output:
    """New ids of one step: `counts[i]` of them belong to `sequences[i]`, int32 one after the other in `ids`."""

    sequences: list[Sequence]
    counts: list[int]
    ids: bytes
    logprobs: list[SequenceLogprobs]
    finished: list[Finished]


@dataclass(slots=True)
class SchedulerCounters:
    """Absolute since the start; the largest numbers are of one step."""

    admitted: int = 0
    preemptions: int = 0
    bypasses: int = 0
    prefill_tokens: int = 0
    generated: int = 0
    most_rows: int = 0


class StepFault(RuntimeError):
    """Injected by a test: the engine dies inside a step."""


class Scheduler:
    """Queue, running set, and the laws of both."""

    def __init__(self, pool: BlockPool, prefix: PrefixCache, slots: Slots, limits: Limits) -> None:
        self.pool, self.prefix, self.limits = pool, prefix, limits
        self.counters = SchedulerCounters()
        self.sequences: dict[int, Sequence] = {}
        self.on_start: Callable[[Sequence], None] = lambda _: None  # for one that gets a slot for the first time
        self._slots = slots
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._waiting: list[Sequence] = []  # by order
        self._prefilling: list[Sequence] = []  # by order
        self._decoding: list[Sequence] = []
        self._finished: list[Finished] = []
        self._arrivals = 0
        self._looked = NOT_LOOKED  # room and arrivals at the last look at a queue that had to wait

    # --- what comes in --------------------------------------------------------------------------------------------

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens, prompt and produced, can ever run."""
        return tokens <= self.pool.num_blocks * self.pool.block_tokens

    def submit(self, sequence: Sequence) -> None:
        """Into the queue. It must fit, and its sid must not be live."""
        self._arrivals += 1
        sequence.order = self._arrivals
        self.sequences[sequence.sid] = sequence
        self._waiting.append(sequence)
        if sequence.left <= 0:  # resumed, with nothing left to produce
            self._end(sequence, State.FINISHED, "length")

    def abort(self, sid: int) -> bool:
        """End a sequence, whatever its state. False when it is not live: then nothing changes."""
        sequence = self.sequences.get(sid)
        if sequence is None:
            return False
        self._end(sequence, State.ABORTED, "abort")
        return True

    def fail(self, sequence: Sequence) -> None:
        """End a sequence for an error of its own."""
        self._end(sequence, State.FAILED, "error", "internal_error")

    def drop_all(self) -> None:
        """End everything without a word: nobody is there any more who wants to know."""
        for sequence in list(self.sequences.values()):
            self._end(sequence, State.ABORTED, "abort")
        self._finished = []

    def take_finished(self) -> list[Finished]:
        """Terminal events since the last call that no step output has carried."""
        found, self._finished = self._finished, []
        return found

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _end(self, sequence: Sequence, state: State, reason: str, code: str = "", stop_id: int = -1) -> None:
        """The one place where a sequence ends: it releases all that it holds and makes its one terminal event."""
        if sequence.slot >= 0:
            self._vacate(sequence, keep=state is not State.FAILED)
        else:
            self._waiting.remove(sequence)
        sequence.move(state)
        del self.sequences[sequence.sid]
        usage = sequence.usage or Usage(sequence.prompt_tokens)
        produced = len(sequence.produced)
        self._finished.append(Finished(sequence.sid, sequence.attempt, reason, produced, usage, code, stop_id))

    def _vacate(self, sequence: Sequence, keep: bool) -> None:
        """Give back slot and blocks. `keep`: what is surely computed may be found by others."""
        (self._prefilling if sequence.state is State.PREFILL else self._decoding).remove(sequence)
        held = sequence.table[: sequence.held].tolist()
        if not keep:
            self.pool.drop(held)
        elif len(sequence.produced) > sequence.found:  # its prefill has completed, and a step for each id but the last
            self.prefix.enter(sequence, sequence.known - 1)
        self.prefix.leave(sequence)
        self.pool.release(held)
        self._slots.close_slot(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.held = -1, 0

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence; it waits for its turn to be rebuilt."""
        self._vacate(sequence, keep=True)
        sequence.move(State.PREEMPTED)
        insort(self._waiting, sequence, key=lambda item: item.order)
        self._looked = NOT_LOOKED
        self.counters.preemptions += 1

    # --- a step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Plan the next step and count it as launched; None when there is nothing to run now."""
        if not self.sequences:
            return None
        step = Step(self.pool.launched + 1)
        self._grow(step)
        self._add_decode_rows(step)
        if self._waiting:
            self._admit()
        if self._prefilling:
            self._add_prefill_rows(step)
        if not step.rows:
            return None
        if step.hooked:
            self._inject(step)
        self.pool.launch()
        self.counters.prefill_tokens += step.prefill_tokens
        self.counters.most_rows = max(self.counters.most_rows, len(step.rows))
        return step

    def _grow(self, step: Step) -> None:
        """Give decoding sequences the block that their next token needs, the oldest first, or preempt the youngest."""
        needy = [sequence for sequence in self._decoding if sequence.planned >= sequence.stop_at]
        needy.sort(key=lambda sequence: sequence.order)
        size, pool = self.pool.block_tokens, self.pool
        for sequence in needy:
            if sequence.state is not State.DECODE or sequence.planned >= sequence.end:
                continue  # preempted for an older one; or its last id is on its way
            need = sequence.planned // size + 1 - sequence.held
            while sequence.slot >= 0 and pool.available() + pool.coming() < need:
                self._preempt(max(self._prefilling + self._decoding, key=lambda item: item.order))
            if sequence.slot >= 0 and pool.available() >= need:  # else they come when the step in flight is done
                step.filled.append((sequence, sequence.planned))
                self._take_blocks(sequence, need)

    def _take_blocks(self, sequence: Sequence, count: int) -> None:
        held = sequence.held
        sequence.table[held : held + count] = self.pool.allocate(count)
        sequence.held = held + count
        sequence.stop_at = min(sequence.held * self.pool.block_tokens, sequence.end)

    def _add_decode_rows(self, step: Step) -> None:
        number, rows, sampled = step.number, step.rows, step.sampled
        for sequence in self._decoding:
            planned = sequence.planned
            if planned < sequence.stop_at:
                row = sequence.row
                row.start = planned
                sequence.planned = planned + 1
                sequence.last_step = number
                rows.append(row)
                sampled.append(sequence)
                if sequence.hooks is not None:
                    step.hooked.append(sequence)

    def _add_prefill_rows(self, step: Step) -> None:
        """Chunks under the budget: half of it for the oldest, the rest for those with the fewest tokens left.

        So a long prompt does not keep short ones waiting, and any number of short ones does not stop a long one.
        """
        size = self.pool.block_tokens
        budget = max(self.limits.prefill_chunk_tokens - len(step.rows), size)
        oldest, *others = self._prefilling
        others.sort(key=lambda sequence: sequence.known - sequence.planned)
        wanted = sum(sequence.known - sequence.planned for sequence in others)
        share = budget // 2 // size * size
        if share == 0 and step.number % 2:  # one block at a time: in turns
            share = size
        left = budget - self._add_chunk(step, oldest, max(share, budget - wanted))
        for sequence in others:
            if left <= 0:
                break
            left -= self._add_chunk(step, sequence, left)

    def _add_chunk(self, step: Step, sequence: Sequence, budget: int) -> int:
        """A row of at most `budget` known ids that ends at a block border, at the prompt's end, or at the last id."""
        start, known = sequence.planned, sequence.known
        limit = sequence.prompt_tokens if start < sequence.prompt_tokens else known  # a rebuild has these two parts
        end = min(limit, start + budget)
        if end < limit:
            end -= end % self.pool.block_tokens
        if end <= start:
            return 0
        sample = end == known
        step.rows.append(Row(sequence.slot, start, end - start, sequence.ids(start, end), sequence.table, sample))
        step.filled.append((sequence, end))
        step.prefill_tokens += end - start
        sequence.planned, sequence.last_step = end, step.number
        if sequence.hooks is not None:
            step.hooked.append(sequence)
        if sample:
            step.sampled.append(sequence)
            self._prefilling.remove(sequence)
            self._decoding.append(sequence)
            sequence.move(State.DECODE)
        return end - start

    # --- admission ------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Blocks for newcomers: each running sequence that may still grow keeps one."""
        size = self.pool.block_tokens
        kept = sum(sequence.held * size < sequence.end for sequence in self._prefilling)
        kept += sum(sequence.held * size < sequence.end for sequence in self._decoding)
        return self.pool.available() - kept

    def _admit(self) -> None:
        """Start waiting sequences in order. One that finds too few blocks is passed by a bounded number of others."""
        if not self._free_slots:
            return
        size, room = self.pool.block_tokens, self._room()
        if room <= self._looked[0] and self._arrivals == self._looked[1]:
            return  # nobody fitted at the last look, and there is no more room now
        blocked: list[Sequence] = []
        waits = False
        for sequence in list(self._waiting):
            if not self._free_slots:
                waits = True
                break
            if sequence.last_step > self.pool.completed or self.prefix.still_awaits(sequence):
                waits = True  # for its last id; or for a prefix that another one is computing
                continue
            hit = self.prefix.find(sequence)
            if hit.under_way:
                waits = True
                continue
            count = -(-min(sequence.known + 1, sequence.end) // size)
            price = count - len(hit.blocks) + self.pool.idle_among(hit.blocks)
            if price > room:
                blocked.append(sequence)
            else:
                for item in blocked:
                    item.bypassed += 1
                self.counters.bypasses += bool(blocked)
                self._start(sequence, hit, count)
                room -= price + (count * size < sequence.end)
            if blocked and max(item.bypassed for item in blocked) >= self.limits.max_bypass:
                break
        self._looked = (room, self._arrivals) if blocked and not waits else NOT_LOOKED

    def _start(self, sequence: Sequence, hit: Hit, count: int) -> None:
        """Give a sequence a slot and its first `count` blocks; an error in this is its own."""
        slot = self._free_slots[-1]
        try:
            self._slots.open_slot(slot, sequence.slot_state())
        except Exception as error:  # noqa: BLE001  whatever it is: only this sequence fails
            log.error("a sequence could not be admitted: %s", type(error).__name__)
            self.fail(sequence)
            return
        if sequence.usage is None:
            self.counters.admitted += 1
            self.on_start(sequence)
        self._free_slots.pop()
        self._waiting.remove(sequence)
        sequence.slot = sequence.row.slot = slot
        have = len(hit.blocks)
        self.pool.acquire(hit.blocks)
        sequence.table[:have] = hit.blocks
        sequence.held, sequence.planned = have, have * self.pool.block_tokens
        self._take_blocks(sequence, count - have)
        self.prefix.start(sequence, hit)
        sequence.found = len(sequence.produced)
        sequence.move(State.PREFILL)
        insort(self._prefilling, sequence, key=lambda item: item.order)

    # --- results --------------------------------------------------------------------------------------------------

    def complete(self, step: Step, result: StepResult) -> Output:
        """The step has run: take its ids. Steps complete in the order of their launch."""
        self.pool.complete(step.number)
        if not result.finite.all():
            self._poison([step.sampled[index] for index in np.flatnonzero(~result.finite)])
        for sequence, computed in step.filled:
            if sequence.slot >= 0:
                self.prefix.enter(sequence, computed)
        over: list[tuple[Sequence, int]] = []
        stale = False
        for sequence, token in zip(step.sampled, result.ids.tolist(), strict=True):
            if sequence.ended:
                stale = True
                continue
            sequence.produced.append(token)
            sequence.left -= 1
            if token in sequence.stops or not sequence.left:
                over.append((sequence, token))
        if stale or result.further:
            output = self._ragged(step, result, over)
        else:
            output = Output(step.sampled, [1] * len(step.sampled), result.ids.tobytes(), [], [])
        if result.logprobs:
            self._add_logprobs(step, result, output)
        for sequence, token in over:
            if token in sequence.stops:
                self._end(sequence, State.FINISHED, "stop", stop_id=token)
            else:
                self._end(sequence, State.FINISHED, "length")
        self.counters.generated += len(output.ids) // 4
        output.finished = self.take_finished()
        return output

    def _poison(self, sequences: list[Sequence]) -> None:
        """Their logits were not finite: whatever lies in their blocks is not to be used again."""
        for sequence in sequences:
            if sequence.ended:
                continue
            if sequence.slot < 0:  # preempted since: its blocks are on their way to others, and will be filled anew
                self.prefix.forget(sequence)
            log.error("the logits of a sequence were not finite")
            self.fail(sequence)

    def _ragged(self, step: Step, result: StepResult, over: list[tuple[Sequence, int]]) -> Output:
        """The output of a step in which a row counts for nothing, or gave several ids."""
        sequences: list[Sequence] = []
        counts: list[int] = []
        ids: list[int] = []
        ended = {sequence.sid for sequence, _ in over}
        for index, (sequence, token) in enumerate(zip(step.sampled, result.ids.tolist(), strict=True)):
            if sequence.ended:
                continue
            found = [token]
            further = result.further.get(index)
            if further is not None and sequence.sid not in ended:
                found += self._take_further(sequence, further, over)
            sequences.append(sequence)
            counts.append(len(found))
            ids += found
        return Output(sequences, counts, np.array(ids, np.int32).tobytes(), [], [])

    def _take_further(self, sequence: Sequence, further: Further, over: list[tuple[Sequence, int]]) -> list[int]:
        """Ids after the first one of a row, up to the sequence's end."""
        if sequence.last_step > self.pool.completed:
            raise RuntimeError("a row with several ids was planned one step ahead")
        taken: list[int] = []
        for token in further.ids:
            taken.append(token)
            sequence.produced.append(token)
            sequence.left -= 1
            if token in sequence.stops or not sequence.left:
                over.append((sequence, token))
                break
        sequence.planned += len(taken)
        return taken

    def _add_logprobs(self, step: Step, result: StepResult, output: Output) -> None:
        counts = {id(sequence): count for sequence, count in zip(output.sequences, output.counts, strict=True)}
        for index, first in sorted(result.logprobs.items()):
            sequence = step.sampled[index]
            if (count := counts.get(id(sequence), 0)) == 0:
                continue
            further = result.further.get(index)
            found = [first, *further.logprobs[: count - 1]] if further is not None else [first]
            records = [_record(item) for item in found]
            sequence.records += records
            output.logprobs.append(SequenceLogprobs(sequence.sid, len(sequence.produced) - count, records))

    # --- faults and checks ----------------------------------------------------------------------------------------

    def _inject(self, step: Step) -> None:
        """Do what test hooks of this step's sequences ask for."""
        wanted = {sequence.slot: sequence for sequence in step.hooked}
        for row in step.rows:
            sequence = wanted.get(row.slot)
            if sequence is None or (hooks := sequence.hooks) is None:
                continue
            hooks.steps += 1
            if hooks.steps == hooks.fail_step:
                raise StepFault(f"injected in step {hooks.fail_step} of a sequence")
            first = row.start + row.count - sequence.prompt_tokens + 1  # number of the id that this row samples
            row.nan_logits = row.sample and first <= hooks.nan_step < first + hooks.width

    def check(self) -> None:
        """Raises PoolError or AssertionError when blocks, slots or lists do not add up."""
        running = self._prefilling + self._decoding
        self.pool.check([sequence.table[: sequence.held].tolist() for sequence in running])
        slots = sorted(self._free_slots + [sequence.slot for sequence in running])
        assert slots == list(range(self.limits.max_running)), "slots do not add up"
        assert all(sequence.state is State.PREFILL for sequence in self._prefilling), "a wrong state in prefill"
        assert all(sequence.state is State.DECODE for sequence in self._decoding), "a wrong state in decode"
        for queue in (self._waiting, self._prefilling):
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(orders), "a queue is out of order"
        assert all(item.slot < 0 and not item.held for item in self._waiting), "one that waits holds something"
        everyone = {sequence.sid for sequence in running + self._waiting}
        assert everyone == set(self.sequences), "a sequence is in no list or in two"
        assert len(everyone) == len(running) + len(self._waiting), "a sequence is in no list or in two"
        if not running:
            self.prefix.check()


def _record(found: Logprobs) -> TokenLogprobs:
    return TokenLogprobs(found.logprob, found.top_ids, found.top_logprobs)
