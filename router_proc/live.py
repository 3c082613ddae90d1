"""What live sequences hold in this process, and the one function that gives it all back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from router_proc.admission import Admission
from router_proc.config import RouterConfig
from router_proc.journal import Journal, Sequence, State
from router_proc.placement import Placement
from router_proc.ranks import Rank
from wire.messages import Usage, rid_of


@dataclass(slots=True)
class Totals:
    """Counts since the process started."""

    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    generated_tokens: int = 0
    stale_outputs: int = 0
    missing_outputs: int = 0  # gaps inside sequences; those of links are counted there
    routed: Counter[str] = field(default_factory=Counter)  # by reason
    refused: Counter[str] = field(default_factory=Counter)  # by error code
    ended: Counter[str] = field(default_factory=Counter)  # by state
    aborted: Counter[str] = field(default_factory=Counter)  # requests, by reason

    def add_usage(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.device_tokens += usage.device_tokens
        self.host_tokens += usage.host_tokens


class Live:
    """Journal, placement, admission and ranks: every sequence is in all of them or in none."""

    def __init__(self, config: RouterConfig) -> None:
        self.journal = Journal()
        self.placement = Placement(config.ranks, config.routing, config.affinity_slack_tokens)
        self.admission = Admission(config.max_queued_requests, config.max_queued_tokens)
        self.ranks = [Rank(index) for index in range(config.ranks)]
        self.totals = Totals()

    def release(self, sequence: Sequence, state: State, now: float) -> None:
        """End a sequence in one of the final states, and free all that it holds here. The one place."""
        sequence.move(state)
        sequence.flowing = False
        if sequence.rank is not None:
            del sequence.rank.sequences[sequence.sid]
        done = state is State.FINISHED
        if sequence.share is not None:
            self.placement.release(sequence.share, len(sequence.produced) if done else 0)
        queued = 0 if sequence.started else sequence.prompt.tokens
        self.admission.release(queued, now - sequence.started if done else 0.0)
        self.journal.close(sequence)
        self.totals.ended[state.value] += 1

    def abort(self, sequences: list[Sequence], reason: str) -> None:
        """Ask the ranks to end sequences. Idempotent; they keep what they hold until their rank says so."""
        rids = set()
        for sequence in sequences:
            if sequence.aborting or sequence.rank is None:
                continue
            sequence.aborting, sequence.flowing = True, False
            sequence.rank.aborts.setdefault(reason, []).append(sequence.sid)
            rids.add(rid_of(sequence.sid))
        if rids and reason != "stop":  # a stop string is how a sequence ends well
            self.totals.aborted[reason] += len(rids)

    def check(self) -> None:
        """With no sequence anywhere: raises AssertionError when something is left."""
        self.journal.check()
        self.placement.check()
        self.admission.check()
        for rank in self.ranks:
            assert not rank.sequences, f"rank {rank.index} has {len(rank.sequences)} sequences"
