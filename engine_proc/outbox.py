"""What an engine tells its router. A message that the link does not take is kept, and merged into the next one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine_proc.scheduler import Output
from engine_proc.sequence import ID_BYTES, Sequence
from wire.link import Dialer
from wire.messages import Accepted, Finished, Message, SequenceLogprobs, StepOutput

MOST_KEPT = 1 << 20  # ids; with more of them kept no new step is launched


@dataclass(slots=True)
class _Kept:
    """Outputs that were not sent: per sequence the number of ids that the router has."""

    offsets: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    ids: int = 0


class Outbox:
    """Keeps order: what was put first is sent first."""

    def __init__(self, link: Dialer) -> None:
        self._link = link
        self._accepted: list[Sequence] = []
        self._others: deque[Message] = deque()
        self._kept = _Kept()

    @property
    def blocked(self) -> bool:
        """Something could not be sent: try again soon."""
        return bool(self._others or self._accepted or self._kept.offsets or self._kept.finished)

    @property
    def full(self) -> bool:
        """So much is kept that nothing new should be made."""
        return self._kept.ids >= MOST_KEPT

    def accept(self, sequence: Sequence) -> None:
        """A sequence is in the queue; told with the next flush."""
        self._accepted.append(sequence)

    def tell(self, message: Message) -> None:
        """Any other message."""
        self._others.append(message)

    def clear(self) -> None:
        """Nobody is there any more who wants it."""
        self._accepted.clear()
        self._others.clear()
        self._kept = _Kept()

    def put(self, output: Output) -> None:
        """Send one step's output, or keep it; what was kept before goes with it in one message."""
        kept = self._kept
        if kept.offsets or kept.finished or not self._send_others() or not self._send(output):
            self._keep(output)
            self.flush()

    def _send(self, output: Output) -> bool:
        sequences, counts = output.sequences, output.counts
        if not sequences and not output.finished:
            return True
        message = StepOutput(
            [sequence.sid for sequence in sequences],
            [sequence.attempt for sequence in sequences],
            [len(sequence.produced) - count for sequence, count in zip(sequences, counts, strict=True)],
            counts,
            output.finished,
            output.logprobs,
        )
        return self._link.send(message, output.ids)

    def _keep(self, output: Output) -> None:
        kept = self._kept
        for sequence, count in zip(output.sequences, output.counts, strict=True):
            if kept.sequences.get(sequence.sid) is not sequence:  # the first of it, or a new attempt
                kept.sequences[sequence.sid] = sequence
                kept.offsets[sequence.sid] = len(sequence.produced) - count
            kept.ids += count
        kept.finished += output.finished

    def repeat(self, sequence: Sequence, offset: int) -> bool:
        """The router has only `offset` ids of a live sequence. False when the sequence has not so many."""
        if not 0 <= offset <= len(sequence.produced):
            return False
        kept = self._kept
        known = kept.offsets.get(sequence.sid, offset) if kept.sequences.get(sequence.sid) is sequence else offset
        kept.offsets[sequence.sid] = min(offset, known)
        kept.sequences[sequence.sid] = sequence
        kept.ids += len(sequence.produced) - offset
        return True

    def flush(self) -> None:
        """Send what is kept, as far as the link takes it."""
        kept = self._kept
        if self._send_others() and (kept.offsets or kept.finished):
            message, ids = _merged(kept)
            if self._link.send(message, ids):
                self._kept = _Kept()

    def _send_others(self) -> bool:
        """All but outputs, which come after them; True when nothing is left."""
        if self._accepted:
            sids = [sequence.sid for sequence in self._accepted]
            if not self._link.send(Accepted(sids, [sequence.attempt for sequence in self._accepted])):
                return False
            self._accepted.clear()
        while self._others:
            if not self._link.send(self._others[0]):
                return False
            self._others.popleft()
        return True


def _merged(kept: _Kept) -> tuple[StepOutput, bytes]:
    """All that was kept as one message."""
    sids, attempts, offsets, counts = [], [], [], []
    ids = bytearray()
    logprobs: list[SequenceLogprobs] = []
    for sid, offset in kept.offsets.items():
        sequence = kept.sequences[sid]
        sids.append(sid)
        attempts.append(sequence.attempt)
        offsets.append(offset)
        counts.append(len(sequence.produced) - offset)
        ids += memoryview(sequence.produced).cast("B")[ID_BYTES * offset :]
        base = len(sequence.produced) - len(sequence.records)  # records begin with the first id made here
        if records := sequence.records[max(0, offset - base) :]:
            logprobs.append(SequenceLogprobs(sid, max(offset, base), records))
    return StepOutput(sids, attempts, offsets, counts, kept.finished, logprobs), bytes(ids)
