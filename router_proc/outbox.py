"""What tokenizers are told: merged per tokenizer and drain; the journal itself is the buffer of what does not fit."""

from __future__ import annotations

from array import array
from collections import deque

from router_proc.journal import Sequence
from wire.link import Listener, Peer
from wire.messages import Finished, Message, SequenceLogprobs, StepOutput

RETRY_SECONDS = 0.02

Step = tuple[StepOutput, bytes]


class Tokenizer:
    """One tokenizer process. Messages of its `others` go out before the output that follows them."""

    __slots__ = ("blocked_since", "dirty", "finished", "others", "peer", "retry_at")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.others: deque[Message] = deque()
        self.dirty: list[Sequence] = []  # sequences with ids that it was not given yet
        self.finished: list[Finished] = []
        self.blocked_since = 0.0
        self.retry_at = 0.0

    def tell(self, message: Message) -> None:
        """Queue an `Accepted` or `Rejected`."""
        self.others.append(message)

    def flush(self, listener: Listener, now: float, only: Step | None) -> None:
        """Send what there is. `only`: the one StepOutput since the last flush, when it holds nothing to leave out."""
        if self.blocked_since and now < self.retry_at:
            return
        peer, others = self.peer, self.others
        while others:
            if not listener.send(peer, others[0]):
                self._block(now)
                return
            others.popleft()
        dirty = self.dirty
        if not dirty and not self.finished:
            self.blocked_since = 0.0
            return
        if only is not None and self._is_all(only[0]):
            message, frame = only
        else:
            message, frame = self._merged()
        if not listener.send(peer, message, frame):
            self._block(now)
            return
        self.blocked_since = 0.0
        for sequence in dirty:
            sequence.dirty = False
            sequence.forwarded = len(sequence.produced)
            if sequence.logprobs:
                sequence.acknowledge(sequence.forwarded)
        self.dirty, self.finished = [], []

    def _is_all(self, message: StepOutput) -> bool:
        """Whether a message is exactly what this tokenizer is to be told: nothing else waits, nothing is for others."""
        return not self.blocked_since and len(self.dirty) == len(message.sids) and self.finished == message.finished

    def _block(self, now: float) -> None:
        self.blocked_since = self.blocked_since or now
        self.retry_at = now + RETRY_SECONDS

    def _merged(self) -> Step:
        """Everything that the journal has beyond what was forwarded, one entry a sequence."""
        sids, attempts, offsets, counts = [], [], [], []
        logprobs: list[SequenceLogprobs] = []
        ids = array("i")
        for sequence in self.dirty:
            produced, start = sequence.produced, sequence.forwarded
            count = len(produced) - start
            sids.append(sequence.sid)
            attempts.append(sequence.attempt)
            offsets.append(start)
            counts.append(count)
            if count == 1:
                ids.append(produced[start])
            else:
                ids += produced[start:] if start else produced
            logprobs += sequence.logprobs
        return StepOutput(sids, attempts, offsets, counts, self.finished, logprobs), ids.tobytes()
