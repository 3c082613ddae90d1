"""The journal: the router's record of each live sequence, from which it can be rebuilt on any rank."""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING

from wire.keys import KEY_BYTES
from wire.messages import SequenceLogprobs, Submit, Usage, choice_of

if TYPE_CHECKING:
    from router_proc.outbox import Tokenizer
    from router_proc.placement import Share
    from router_proc.ranks import Rank

ID_BYTES = 4
MAX_CHOICES = 256


class State(Enum):
    """Where a sequence is, as the router knows it."""

    RECEIVED = "received"  # journalled, given to no rank yet
    QUEUED = "queued"  # sent to a rank that has not answered yet
    PREFILL = "prefill"  # a rank has it, in its queue or in prefill; nothing is produced
    DECODE = "decode"  # ids come
    PREEMPTED = "preempted"  # its rank has taken its blocks and will rebuild it
    RESUMING = "resuming"  # its rank is lost; it waits for another
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


ENDS = frozenset({State.ABORTED, State.FAILED})
MOVES: dict[State, frozenset[State]] = {
    State.RECEIVED: ENDS | {State.QUEUED},
    State.QUEUED: ENDS | {State.PREFILL, State.RESUMING},
    State.PREFILL: ENDS | {State.DECODE, State.PREEMPTED, State.RESUMING},
    State.DECODE: ENDS | {State.PREEMPTED, State.RESUMING, State.FINISHED},
    State.PREEMPTED: ENDS | {State.PREFILL, State.DECODE, State.RESUMING},
    State.RESUMING: ENDS | {State.QUEUED},
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
}


class IllegalMove(Exception):
    """A fault of the router itself: a state change that the table does not have."""


class Prompt:
    """One `Submit` as it came: shared by its n sequences.

    ids: P int32 little-endian; keys: 32 bytes per full block; `deadline`: monotonic seconds, 0.0 = none.
    """

    __slots__ = ("deadline", "ids", "keys", "live", "received", "submit", "tokenizer", "tokens")

    def __init__(self, submit: Submit, ids: bytes, keys: bytes, tokenizer: Tokenizer, now: float) -> None:
        self.submit, self.ids, self.keys, self.tokenizer = submit, ids, keys, tokenizer
        self.tokens = len(ids) // ID_BYTES
        self.received = now
        self.deadline = now + submit.timeout if submit.timeout else 0.0
        self.live: list[Sequence] = []


class Sequence:
    """All that is needed to go on with a sequence elsewhere, and where it is now."""

    __slots__ = (
        "aborting",
        "accepted",
        "attempt",
        "deaths",
        "dirty",
        "flowing",
        "forwarded",
        "generation",
        "logprobs",
        "produced",
        "prompt",
        "rank",
        "reason",
        "recorded",
        "share",
        "sid",
        "started",
        "state",
        "tokenizer",
        "told",
        "usage",
    )

    def __init__(self, sid: int, prompt: Prompt) -> None:
        self.sid, self.prompt, self.tokenizer = sid, prompt, prompt.tokenizer
        self.attempt = prompt.submit.attempt
        self.state = State.RECEIVED
        self.rank: Rank | None = None
        self.generation = 0  # of the rank's process
        self.reason = ""  # why that rank
        self.share: Share | None = None  # of that rank's load
        self.produced = array("i")  # every id, int32
        self.forwarded = 0  # ids that the tokenizer was given
        self.logprobs: list[SequenceLogprobs] = []  # records that the tokenizer has not acknowledged
        self.recorded = 0  # ids that have had a logprob record
        self.usage: Usage | None = None  # of the first admission
        self.deaths = 0  # of ranks in this sequence's steps, by their own fault
        self.started = 0.0  # when the first id came
        self.accepted = False  # the tokenizer was told that a rank has it
        self.aborting = False  # its rank was asked to end it
        self.told = False  # the tokenizer knows its end, or wants no more of it
        self.flowing = False  # new ids are journalled and passed on without further questions
        self.dirty = False  # in its tokenizer's list of sequences with new ids

    def move(self, state: State) -> None:
        """Raises IllegalMove when the table does not have it."""
        if state not in MOVES[self.state]:
            raise IllegalMove(f"{self.state.value} → {state.value}")
        self.state = state

    def acknowledge(self, offset: int) -> None:
        """The tokenizer has everything below `offset`: its logprob records need not be kept."""
        if self.logprobs:
            self.logprobs = [item for item in self.logprobs if item.offset + len(item.tokens) > offset]

    def size(self) -> int:
        """Bytes of ids that it holds beside the prompt."""
        return ID_BYTES * len(self.produced)


def rebuild(sequence: Sequence) -> tuple[Submit, tuple[bytes, bytes, bytes]]:
    """What a rank needs to run the sequence from where it is: `Submit`, and prompt ids, block keys, produced ids.

    The deadline is the router's own: engines know of none.
    """
    prompt, origin = sequence.prompt, sequence.prompt.submit
    submit = Submit(
        sid=sequence.sid,
        attempt=sequence.attempt,
        n=1,
        tenant=origin.tenant,
        params=origin.params,
        session_key=origin.session_key,
        user=origin.user,
        first_hash=origin.first_hash,
    )
    return submit, (prompt.ids, prompt.keys, sequence.produced.tobytes())


class Journal:
    """All live sequences by id."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.prompt_bytes = 0  # of ids and keys, once per prompt

    def refusal(self, submit: Submit, frames: list[bytes], block_tokens: int) -> str:
        """What is wrong with a `Submit` as a message; "" if nothing is."""
        if len(frames) != 2:
            return "it needs two frames"
        ids, keys = frames
        if not ids or len(ids) % ID_BYTES or len(keys) % KEY_BYTES:
            return "its frames are no ids and keys"
        if len(keys) // KEY_BYTES > len(ids) // ID_BYTES // block_tokens:
            return "it has more keys than full blocks"
        if submit.n < 1 or choice_of(submit.sid) + submit.n > MAX_CHOICES or submit.sid < 0:
            return "it has a wrong number of sequences"
        if submit.params.max_tokens < 1 or not submit.timeout >= 0:
            return "it has no tokens or no time to run"
        return ""

    def is_known(self, submit: Submit) -> bool:
        """Whether one of its sequences is live already."""
        return any(sid in self.sequences for sid in range(submit.sid, submit.sid + submit.n))

    def open(self, submit: Submit, ids: bytes, keys: bytes, tokenizer: Tokenizer, now: float) -> Prompt:
        """Record a request before anything of it is sent on."""
        prompt = Prompt(submit, ids, keys, tokenizer, now)
        prompt.live = [Sequence(sid, prompt) for sid in range(submit.sid, submit.sid + submit.n)]
        for sequence in prompt.live:
            self.sequences[sequence.sid] = sequence
        self.prompt_bytes += len(ids) + len(keys)
        return prompt

    def close(self, sequence: Sequence) -> None:
        """Forget a sequence, and its prompt with the last one. Only `live.Live.release` calls this."""
        del self.sequences[sequence.sid]
        prompt = sequence.prompt
        prompt.live.remove(sequence)
        if not prompt.live:
            self.prompt_bytes -= len(prompt.ids) + len(prompt.keys)

    def size(self) -> int:
        """Bytes of ids and keys in it."""
        return self.prompt_bytes + sum(sequence.size() for sequence in self.sequences.values())

    def check(self) -> None:
        """With no sequence anywhere: raises AssertionError when something is left."""
        assert not self.sequences, f"{len(self.sequences)} sequences are left"
        assert self.prompt_bytes == 0, f"{self.prompt_bytes} prompt bytes are left"
