"""Placement: which rank gets a request. Pure: no sockets, no clock; the simulation runs this very code.

The load of a rank is what the router itself has put there and not yet seen done: estimated uncached prompt tokens
plus expected output tokens of its sequences. It is counted when a request is dispatched and lowered by the events of
those sequences, never replaced by anything that engines report.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from router_proc.prefix_map import PrefixMap

FIRST_GUESS_TOKENS = 1024  # expected output until one sequence has ended
MEAN_OVER = 128  # sequences that the running mean of output lengths looks back on
MIN_MAP_KEYS = 65_536
MAX_MAP_KEYS = 2_000_000
MAX_HOMES = 65_536


@dataclass(slots=True)
class Wanted:
    """What placement must know of a request (one prompt, `n` sequences). `keys`: 32 bytes per full block."""

    tenant: str
    keys: bytes
    prompt_tokens: int
    max_tokens: int
    session_key: str = ""
    user: str = ""
    first_hash: bytes = b""
    n: int = 1
    prefix_cache: bool = True


@dataclass(slots=True)
class Choice:
    """A rank, why, and how many prompt tokens it is believed to hold."""

    rank: int
    reason: str  # "session" | "prefix" | "first-message" | "least-loaded"
    cached_tokens: int


@dataclass(slots=True)
class Share:
    """What one sequence adds to the load of a rank, in tokens."""

    rank: int
    start: int  # of that rank; what belongs to a former one counts no more
    prompt_left: int
    output_left: int
    weight: int  # both, as they were when it was dispatched


class Placement:
    """Loads, homes and the prefix map of all ranks."""

    def __init__(self, ranks: int, routing: str, slack_tokens: int) -> None:
        self._affinity = routing == "affinity"
        self._slack = slack_tokens
        self.loads: list[float] = [math.inf] * ranks  # infinite: not in rotation
        self.weights = [0] * ranks  # of the sequences there, as they were when they were dispatched
        self.map = PrefixMap(MIN_MAP_KEYS)
        self._starts: list[tuple[int, int]] = [(0, -1)] * ranks  # generation, slot in the map
        self._start_of = [0] * ranks  # number of the start that is in rotation; 0 = none
        self._next_start = 1
        self._rank_of: dict[int, int] = {}  # slot → rank
        self._pools = [0] * ranks  # blocks that each rank can hold
        self._homes: OrderedDict[tuple[str, str, str | bytes], int] = OrderedDict()  # → slot
        self._block_tokens, self._keep_tokens = 128, 1
        self._turn = 0
        self._ended, self._mean = 0, float(FIRST_GUESS_TOKENS)

    @property
    def homes(self) -> int:
        """Number of session, user and first-message keys with a home."""
        return len(self._homes)

    # --- ranks ----------------------------------------------------------------------------------------------------

    def ready(self, rank: int, generation: int, block_tokens: int, keep_tokens: int, pool_tokens: int) -> None:
        """Take a rank into rotation, with nothing on it. A known generation keeps what the maps know of it."""
        self._block_tokens, self._keep_tokens = block_tokens, keep_tokens
        known, slot = self._starts[rank]
        if slot < 0 or known != generation:
            self.lost(rank)
            slot = self._new_slot()
            self._starts[rank] = (generation, slot)
            self._rank_of[slot] = rank
        self._pools[rank] = pool_tokens // block_tokens
        # Ranks also keep prefixes in host memory, whose size the router does not know: a factor covers it.
        self.map.capacity = min(MAX_MAP_KEYS, max(MIN_MAP_KEYS, 4 * sum(self._pools)))
        self.map.revive(slot)
        self.loads[rank], self.weights[rank] = 0, 0
        self._start_of[rank], self._next_start = self._next_start, self._next_start + 1

    def _new_slot(self) -> int:
        slot = self.map.new_slot()
        if slot is None:  # thousands of restarts: forget, and number the ranks anew
            self.map.clear()
            self._homes.clear()
            self._rank_of.clear()
            for rank, (generation, old) in enumerate(self._starts):
                if old >= 0:
                    fresh = self.map.new_slot()
                    assert fresh is not None, "more ranks than slots"
                    self._starts[rank] = (generation, fresh)
                    self._rank_of[fresh] = rank
                    if self.loads[rank] != math.inf:
                        self.map.revive(fresh)
            slot = self.map.new_slot()
            assert slot is not None, "more ranks than slots"
        return slot

    def lost(self, rank: int) -> None:
        """Take a rank out of rotation: what it held counts as absent until its generation is ready again."""
        slot = self._starts[rank][1]
        if slot >= 0:
            self.map.retire(slot)
        self.loads[rank], self.weights[rank], self._start_of[rank] = math.inf, 0, 0

    # --- decision -------------------------------------------------------------------------------------------------

    def choose(self, wanted: Wanted, avoid: Collection[int] = ()) -> Choice | None:
        """The rank for a request; None when there is none. Changes nothing: `dispatched` does."""
        loads = self.loads
        if avoid:
            loads = [math.inf if rank in avoid else load for rank, load in enumerate(loads)]
        low = min(loads)
        if low == math.inf:
            return None
        if not self._affinity:
            return Choice(self._least_loaded(wanted, loads, low, 0), "least-loaded", 0)
        home, reason, held = self._home(wanted, loads)
        here = self._cached(wanted, held)
        if home >= 0 and loads[home] - low <= self._slack:
            return Choice(home, reason, here)
        depth = self._depth(wanted)
        other = self._least_loaded(wanted, loads, low, depth)
        there = self._cached(wanted, self._depth(wanted, other, depth)) if depth else 0
        if home >= 0 and loads[home] - loads[other] <= max(self._slack, here - there):
            return Choice(home, reason, here)
        return Choice(other, "least-loaded", there)

    def _depth(self, wanted: Wanted, rank: int = -1, at_most: int = 1 << 62) -> int:
        """Leading blocks of the prompt that a rank was given before; -1 = any rank in rotation."""
        if not wanted.prefix_cache:
            return 0
        return self.map.depth(wanted.keys, -1 if rank < 0 else self._starts[rank][1], at_most)

    def _cached(self, wanted: Wanted, depth: int) -> int:
        """Prompt tokens that need not be computed where `depth` blocks are: whole blocks, below the cap."""
        return min(self._reusable(wanted), depth * self._block_tokens) if depth else 0

    def _reusable(self, wanted: Wanted) -> int:
        """The most prompt tokens that a cache can save: at least keep_tokens are computed, the rest in blocks."""
        if not wanted.prefix_cache or not self._keep_tokens:
            return 0
        return max(0, wanted.prompt_tokens - self._keep_tokens) // self._block_tokens * self._block_tokens

    def _home(self, wanted: Wanted, loads: list[float]) -> tuple[int, str, int]:
        """The rank that a request belongs to (-1: none), why, and the blocks of the prompt that it has.

        By session, else by prefix, else by user or first message.
        """
        if wanted.session_key:
            rank = self._home_of((wanted.tenant, "session", wanted.session_key), loads)
            if rank >= 0:
                return rank, "session", self._depth(wanted, rank)
        if (depth := self._depth(wanted)) > 0:
            ranks = [self._rank_of[slot] for slot in self.map.holders(wanted.keys, depth)]
            rank = min(ranks, key=loads.__getitem__)
            if loads[rank] != math.inf:
                return rank, "prefix", depth
        key = _fallback_key(wanted)
        rank = -1 if key is None else self._home_of(key, loads)
        return rank, "first-message", self._depth(wanted, rank) if rank >= 0 else 0

    def _home_of(self, key: tuple[str, str, str | bytes], loads: list[float]) -> int:
        slot = self._homes.get(key, -1)
        rank = self._rank_of.get(slot, -1)
        return rank if rank >= 0 and self._starts[rank][1] == slot and loads[rank] != math.inf else -1

    def _least_loaded(self, wanted: Wanted, loads: list[float], low: float, depth: int) -> int:
        """The least loaded rank; among loads too close to tell apart, the one with the least work under way.

        Progress comes in jumps (a whole prompt at a sequence's first id, a step's ids at a time), and ranks jump at
        different moments. So a difference below the request's own weight, or below half of the load, says more about
        the moment than about the rank; there the weights decide, which do not jump, and at last the turn.
        """
        weight = wanted.prompt_tokens - self._cached(wanted, depth) + self._expected_output(wanted)
        limit = low + min(self._slack, max(weight, low / 2))
        weights, ranks, turn = self.weights, len(loads), self._turn
        close = [rank for rank, load in enumerate(loads) if load <= limit]
        least = min([weights[rank] for rank in close])
        return min([rank for rank in close if weights[rank] == least], key=lambda rank: (rank - turn) % ranks)

    def _expected_output(self, wanted: Wanted) -> int:
        return min(wanted.max_tokens, max(1, round(self._mean)))

    # --- counting -------------------------------------------------------------------------------------------------

    def dispatched(self, wanted: Wanted, choice: Choice) -> list[Share]:
        """Count a request on the rank it was given to, and remember where its prefix and its keys live now."""
        rank, start = choice.rank, self._start_of[choice.rank]
        output = self._expected_output(wanted)
        prompt = wanted.prompt_tokens - choice.cached_tokens
        shares = [Share(rank, start, prompt, output, prompt + output)]
        # The further choices of a prompt find the blocks that the first one computes.
        rest = wanted.prompt_tokens - max(choice.cached_tokens, self._reusable(wanted))
        shares += [Share(rank, start, rest, output, rest + output) for _ in range(wanted.n - 1)]
        total = sum(share.weight for share in shares)
        self.loads[rank] += total
        self.weights[rank] += total
        if choice.reason == "least-loaded":
            self._turn = (rank + 1) % len(self.loads)
        if self._affinity:
            self._remember(wanted, self._starts[rank][1])
        return shares

    def _remember(self, wanted: Wanted, slot: int) -> None:
        homes = self._homes
        fallback = _fallback_key(wanted)
        session = (wanted.tenant, "session", wanted.session_key) if wanted.session_key else None
        for key in (fallback, session):
            if key is not None:
                homes[key] = slot
                homes.move_to_end(key)
        while len(homes) > MAX_HOMES:
            homes.popitem(last=False)
        if wanted.prefix_cache:
            self.map.touch(wanted.keys, slot)

    def _is_current(self, share: Share) -> bool:
        return share.start > 0 and self._start_of[share.rank] == share.start

    def prefilled(self, share: Share) -> None:
        """A sequence has produced its first id: its prompt is no load any more."""
        if self._is_current(share):
            self.loads[share.rank] -= share.prompt_left
        share.prompt_left = 0

    def lower(self, rank: int, tokens: int) -> None:
        """Sequences of a rank in rotation have produced `tokens` of their expected output (their shares know)."""
        self.loads[rank] -= tokens

    def release(self, share: Share, produced: int = 0) -> None:
        """A sequence has left its rank; `produced` > 0: it came to its end by itself with so many ids."""
        if self._is_current(share):
            self.loads[share.rank] -= share.prompt_left + share.output_left
            self.weights[share.rank] -= share.weight
        share.prompt_left = share.output_left = 0
        share.start = 0
        if produced:
            self._ended += 1
            self._mean += (produced - self._mean) / min(self._ended, MEAN_OVER)

    def check(self) -> None:
        """With no sequence anywhere: raises AssertionError when a load or count is not zero."""
        for rank, load in enumerate(self.loads):
            assert load in (0, math.inf), f"rank {rank} has a load of {load} tokens and no sequence"
            assert self.weights[rank] == 0, f"rank {rank} has a weight of {self.weights[rank]} and no sequence"
        assert len(self._homes) <= MAX_HOMES, "more homes than their bound"
        self.map.check()


def _fallback_key(wanted: Wanted) -> tuple[str, str, str | bytes] | None:
    if wanted.user:
        return (wanted.tenant, "user", wanted.user)
    return (wanted.tenant, "first", wanted.first_hash) if wanted.first_hash else None
