"""Ranks: the engine process behind each, what it told about itself, and what all of them together can do."""

from __future__ import annotations

import math

from router_proc.journal import Sequence
from wire.link import Listener, Peer
from wire.messages import Abort, EngineInfo, ServiceInfo, ServiceStatus

AGREED = ("model_digest", "cache_format", "vocab_size", "block_tokens", "keep_tokens", "eos_ids")
FIRST_START_SECONDS = 5.0  # how long a rank is out, until one has come back
MAX_RETRY_SECONDS = 60


class Rank:
    """One place for an engine process. `info` is set while it is in rotation."""

    __slots__ = ("aborts", "index", "info", "lost_at", "orphans", "orphans_of", "peer", "sequences")

    def __init__(self, index: int) -> None:
        self.index = index
        self.peer: Peer | None = None
        self.info: EngineInfo | None = None
        self.sequences: dict[int, Sequence] = {}
        self.aborts: dict[str, list[int]] = {}  # not sent yet: reason → sids
        self.orphans: list[int] = []  # sequences that ended here while the process was silent; it may still run them
        self.orphans_of = 0  # its generation
        self.lost_at = 0.0

    @property
    def ready(self) -> bool:
        return self.info is not None

    @property
    def name(self) -> str:
        return f"engine.{self.index}"

    def send_aborts(self, listener: Listener) -> None:
        """What does not fit into the rank's queue stays for the next time."""
        peer = self.peer
        if peer is None:
            self.aborts.clear()
            return
        for reason in list(self.aborts):
            if not listener.send(peer, Abort(self.aborts[reason], reason)):
                return
            del self.aborts[reason]


def disagreement(info: EngineInfo, index: int, ranks: list[Rank]) -> str:
    """The field in which an engine differs from the ranks in rotation, with both values; "" when it fits."""
    for rank in ranks:
        if rank.info is None or rank.index == index:
            continue
        for field in AGREED:
            mine, theirs = getattr(info, field), getattr(rank.info, field)
            if mine != theirs:
                return f"rank {index} does not fit to rank {rank.index}: {field} is {mine}, not {theirs}"
    return ""


class Service:
    """State of the whole service, as frontends and tokenizers are told."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks = ranks
        self.info: ServiceInfo | None = None
        self._outage = FIRST_START_SECONDS  # how long the last rank that was lost took to come back

    def update(self) -> None:
        """Merge what the ranks in rotation told; with none of them, what is known stays."""
        infos = [rank.info for rank in self._ranks if rank.info is not None]
        if infos:
            first = infos[0]
            self.info = ServiceInfo(
                model_digest=first.model_digest,
                cache_format=first.cache_format,
                vocab_size=first.vocab_size,
                context_length=min(info.context_length for info in infos),
                block_tokens=first.block_tokens,
                keep_tokens=first.keep_tokens,
                eos_ids=first.eos_ids,
            )

    def came_back(self, rank: Rank, now: float) -> None:
        """A rank is in rotation again."""
        if rank.lost_at:
            self._outage = now - rank.lost_at
        rank.lost_at = 0.0

    def retry_after(self, now: float) -> int:
        """Whole seconds (1..60) until a rank that is out should be back, by the last outage."""
        lost = [rank.lost_at for rank in self._ranks if not rank.ready and rank.lost_at]
        left = self._outage - (now - min(lost)) if lost else self._outage
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(left)))

    def status(self, now: float, linked: int, tokenizers: int) -> ServiceStatus:
        """`linked` of `tokenizers` tokenizers have said hello: without one no request can come in."""
        ready, ranks = sum(rank.ready for rank in self._ranks), len(self._ranks)
        if ready and not linked:
            return ServiceStatus("down", "no tokenizer is linked", ready, ranks, self.info)
        if ready:
            state, reason = "ok", ""
            if ready < ranks:
                state, reason = "degraded", f"{ranks - ready} of {ranks} ranks are out"
            elif linked < tokenizers:
                state, reason = "degraded", f"{tokenizers - linked} of {tokenizers} tokenizers are out"
            return ServiceStatus(state, reason, ready, ranks, self.info)
        state, reason = ("loading", "no rank is ready yet") if self.info is None else ("down", "all ranks are out")
        return ServiceStatus(state, reason, 0, ranks, self.info, self.retry_after(now))
