"""The way out: ids of one engine step into the journal, and on to the tokenizers in one message each per drain."""

from __future__ import annotations

import logging

from router_proc.dispatch import Dispatcher
from router_proc.journal import ID_BYTES, Sequence, State
from router_proc.live import Live
from router_proc.outbox import Step, Tokenizer
from router_proc.ranks import Rank
from wire.link import Listener
from wire.messages import Finished, Resync, SequenceLogprobs, StepOutput

REPAIR_SECONDS = 1.0  # ids that are missing must come again until then

log = logging.getLogger("deepinfer.router")


class Outputs:
    """Takes StepOutputs of engines; `flush` passes everything on."""

    def __init__(self, listener: Listener, live: Live, dispatcher: Dispatcher) -> None:
        self._listener, self._live, self._dispatcher = listener, live, dispatcher
        self._only: Step | None = None  # the one StepOutput since the last flush, if nothing of it is to be left out
        self._taken = 0
        self._repairs: dict[int, tuple[Sequence, int, float]] = {}  # asked for from which offset on, until when

    def take(self, rank: Rank, message: StepOutput, frames: list[bytes], now: float) -> bool:
        """Journal the ids, records and ends of one step. False for a message that is no good; then nothing is taken."""
        counts, frame = message.counts, frames[0] if frames else b""
        if not (len(message.sids) == len(message.attempts) == len(message.offsets) == len(counts)):
            return False
        if len(frame) != ID_BYTES * sum(counts) or (counts and min(counts) < 0):
            return False
        clean = self._take_ids(rank, message, memoryview(frame), now)
        for records in message.logprobs:
            clean = self._take_logprobs(rank, records, now) and clean
        for finished in message.finished:
            clean = self._finish(rank, finished, now) and clean
        self._taken += 1
        self._only = (message, frame) if clean and self._taken == 1 else None
        return True

    def _take_ids(self, rank: Rank, message: StepOutput, raw: memoryview, now: float) -> bool:
        """False when something is not to be passed on as it is."""
        live = self._live
        find = live.journal.sequences.get
        ids = raw.cast("i").tolist()
        end = lowered = new = stale = 0
        clean = True
        for sid, attempt, offset, count in zip(
            message.sids, message.attempts, message.offsets, message.counts, strict=True
        ):
            start, end = end, end + count
            sequence = find(sid)
            if sequence is None or sequence.attempt != attempt or sequence.rank is not rank:
                stale += 1
                continue
            produced = sequence.produced
            if offset != len(produced) or not sequence.flowing:
                skip = self._irregular(sequence, offset, count, now)
                if skip:
                    clean = False
                    if skip >= count:
                        continue
                    start += skip
            if (got := end - start) == 1:
                produced.append(ids[start])
            else:
                produced.frombytes(raw[ID_BYTES * start : ID_BYTES * end])
            new += got
            share = sequence.share
            if share is not None and (left := share.output_left):
                less = got if got < left else left
                share.output_left = left - less
                lowered += less
            if not sequence.dirty:
                sequence.dirty = True
                sequence.tokenizer.dirty.append(sequence)
        if lowered:
            live.placement.lower(rank.index, lowered)
        live.totals.generated_tokens += new
        live.totals.stale_outputs += stale
        return clean and not stale

    def _irregular(self, sequence: Sequence, offset: int, count: int, now: float) -> int:
        """The first ids of a sequence, repeated or missing ones, or ones that nobody wants: how many to skip."""
        if sequence.aborting or sequence.told:
            return max(1, count)
        have = len(sequence.produced)
        if offset > have or offset < 0:
            self._miss(sequence, now)
            return max(1, count)
        if offset < have and offset + count <= have:
            return max(1, count)
        if not sequence.flowing:
            self._start(sequence, now)
        return have - offset

    def _start(self, sequence: Sequence, now: float) -> None:
        """Its first ids are here."""
        live = self._live
        if sequence.state is State.QUEUED:
            self._dispatcher.accept([sequence])
        if sequence.state is State.PREFILL:
            sequence.move(State.DECODE)
        sequence.started, sequence.flowing = now, True
        live.admission.started(sequence.prompt.tokens)
        if sequence.share is not None:
            live.placement.prefilled(sequence.share)

    def _miss(self, sequence: Sequence, now: float) -> None:
        """Ids are missing: ask for them once, and give the sequence up if they do not come."""
        have, rank = len(sequence.produced), sequence.rank
        if sequence.sid in self._repairs and self._repairs[sequence.sid][1] == have:
            return
        self._live.totals.missing_outputs += 1
        log.error("output of a sequence is missing from offset %d on", have)
        peer = None if rank is None else rank.peer
        if peer is not None and self._listener.send(peer, Resync([sequence.sid], [have])):
            self._repairs[sequence.sid] = (sequence, have, now + REPAIR_SECONDS)
        else:
            self._give_up(sequence, now)

    def _give_up(self, sequence: Sequence, now: float) -> None:
        self._repairs.pop(sequence.sid, None)
        self._dispatcher.fail([sequence], "internal_error", now)
        self._live.abort([sequence], "admin")

    def tick(self, now: float) -> None:
        """Give up what was not repaired in time."""
        for sid, (sequence, have, until) in list(self._repairs.items()):
            if sequence.told or sid not in self._live.journal.sequences or len(sequence.produced) > have:
                del self._repairs[sid]
            elif now >= until:
                self._give_up(sequence, now)

    def _take_logprobs(self, rank: Rank, records: SequenceLogprobs, now: float) -> bool:
        sequence = self._live.journal.sequences.get(records.sid)
        if sequence is None or sequence.rank is not rank or not sequence.flowing:
            return False
        end, skip = records.offset + len(records.tokens), sequence.recorded - records.offset
        late = skip == 0 and records.offset < sequence.forwarded  # its ids went on without it
        if skip < 0 or late or end > len(sequence.produced):
            self._live.totals.missing_outputs += 1
            log.error("logprobs of a sequence do not fit to its ids")
            self._give_up(sequence, now)
            return False
        if end > sequence.recorded:
            kept = records if not skip else SequenceLogprobs(records.sid, sequence.recorded, records.tokens[skip:])
            sequence.logprobs.append(kept)
            sequence.recorded = end
        return not skip

    def _finish(self, rank: Rank, finished: Finished, now: float) -> bool:
        """The terminal event of a sequence: release it, and pass the event on unless its end was told before."""
        live = self._live
        sequence = live.journal.sequences.get(finished.sid)
        if sequence is None or sequence.attempt != finished.attempt or sequence.rank is not rank:
            live.totals.stale_outputs += 1
            return False
        sequence.usage = sequence.usage or finished.usage
        live.totals.add_usage(finished.usage)
        clean = not sequence.told
        state = State.ABORTED if finished.reason == "abort" else State.FAILED
        if finished.reason in ("stop", "length"):
            if sequence.state is State.DECODE and finished.completion_tokens == len(sequence.produced):
                state = State.FINISHED
            elif not sequence.aborting:  # (the last ids of an aborted one were dropped on purpose)
                live.totals.missing_outputs += 1
                log.error("a sequence ended with ids missing")
                self._dispatcher.fail([sequence], "internal_error", now)
                clean = False
        if not sequence.told:
            sequence.tokenizer.finished.append(finished)
        live.release(sequence, state, now)
        return clean

    def flush(self, tokenizers: list[Tokenizer], now: float) -> None:
        """Send what there is to each tokenizer; what one cannot take now is kept and merged into its next message."""
        for tokenizer in tokenizers:
            if tokenizer.dirty or tokenizer.finished or tokenizer.others:
                tokenizer.flush(self._listener, now, self._only)
        self._only, self._taken = None, 0
