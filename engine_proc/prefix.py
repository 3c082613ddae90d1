"""The device prefix cache as the scheduler sees it: how much of a prompt is there already, and what may enter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine_proc.blocks import BROKEN, ROOT, BlockPool
from engine_proc.cache_spec import CacheSpec
from engine_proc.sequence import NEVER, Sequence
from wire.keys import block_keys, root_key
from wire.messages import Usage

TENANTS = 1024  # roots kept


@dataclass(slots=True)
class Hit:
    """What the index has of a prompt. `why`: the miss reason of the contract, "" if nothing more could be reused."""

    blocks: list[int]
    chain: int
    why: str
    collided: bool
    under_way: bool  # a running sequence is computing the next block


@dataclass(slots=True)
class PrefixCounters:
    """Absolute since the start, first admissions only."""

    queried_tokens: int = 0
    reused_tokens: int = 0
    collisions: int = 0


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """enabled: --prefix-cache. shared: all tenants have one root. key_bits: see `wire.keys.block_keys`."""

    secret: bytes
    model_digest: str
    enabled: bool = True
    shared: bool = False
    key_bits: int = 256


class PrefixCache:
    """`find` and `start` at admission, `enter` when tokens are computed, `leave` when the blocks are given back.

    Of a sequence: `entered` blocks at its table's start are in the index (or copies of such), `border` is the number
    of computed tokens at which the next one is full, `chain` the uid of the last one.
    """

    def __init__(self, pool: BlockPool, spec: CacheSpec, rules: PrefixRules) -> None:
        self.pool, self._spec, self._rules = pool, spec, rules
        self.enabled = rules.enabled and spec.keep_tokens > 0
        self.counters = PrefixCounters()
        self._claimed: set[bytes] = set()
        self._root = lru_cache(maxsize=TENANTS)(self._make_root)

    def _make_root(self, tenant: str) -> bytes:
        return root_key(self._rules.secret, self._rules.model_digest, self._spec.cache_format, tenant)

    def _uses(self, sequence: Sequence) -> bool:
        return self.enabled and sequence.cacheable

    def complete_keys(self, sequence: Sequence, blocks: int) -> None:
        """Extend the sequence's keys to its first `blocks` blocks, whose ids are known."""
        keys, size = sequence.keys, self.pool.block_tokens
        if len(keys) < blocks:
            parent = keys[-1] if keys else self._root("" if self._rules.shared else sequence.tenant)
            raw = sequence.raw(len(keys) * size, blocks * size)
            keys += block_keys(parent, raw, size, self._rules.key_bits)

    def find(self, sequence: Sequence) -> Hit:
        """Look the prompt up. At least `keep_tokens` of its tokens are left to be computed. Changes nothing."""
        if not self._uses(sequence):
            return Hit([], ROOT, "disabled", False, False)
        size, tokens = self.pool.block_tokens, sequence.prompt_tokens
        full, most = tokens // size, max(0, tokens - self._spec.keep_tokens) // size
        self.complete_keys(sequence, full)
        match = self.pool.match(sequence.keys, sequence.prompt_raw, most)
        have, keys = len(match.blocks), sequence.keys
        why = ""
        if have < most:
            why = "evicted" if self.pool.was_evicted(keys[have]) else "cold"
        elif have < full:
            why = "capped" if self.pool.holds(keys[have]) >= 0 else "" if have else "cold"
        sequence.awaits = keys[have] if have < most else b""
        return Hit(match.blocks, match.chain, why, match.collided, sequence.awaits in self._claimed)

    def still_awaits(self, sequence: Sequence) -> bool:
        """Whether the block that the sequence waited for at the last look is still being computed."""
        return sequence.awaits in self._claimed

    def start(self, sequence: Sequence, hit: Hit) -> None:
        """A sequence is admitted with the blocks of its hit (which the caller has acquired and put into its table)."""
        size, have = self.pool.block_tokens, len(hit.blocks)
        sequence.entered = have
        sequence.chain = hit.chain
        if not self._uses(sequence):
            sequence.border = NEVER
        else:
            sequence.border = (have + 1) * size
            full = sequence.prompt_tokens // size
            sequence.claims = [key for key in sequence.keys[have:full] if key not in self._claimed]
            self._claimed.update(sequence.claims)
        if sequence.usage is None:
            self._count(sequence, hit)

    def _count(self, sequence: Sequence, hit: Hit) -> None:
        tokens = len(hit.blocks) * self.pool.block_tokens
        sequence.usage = Usage(sequence.prompt_tokens, tokens, tokens, 0, hit.why)
        if self._uses(sequence):
            self.counters.queried_tokens += sequence.prompt_tokens
            self.counters.reused_tokens += tokens
            self.counters.collisions += hit.collided

    def enter(self, sequence: Sequence, computed: int) -> None:
        """The first `computed` tokens are in the sequence's blocks: those that became full go into the index."""
        if computed < sequence.border:
            return
        size, number = self.pool.block_tokens, sequence.entered
        blocks = computed // size
        self.complete_keys(sequence, blocks)
        while number < blocks and sequence.chain != BROKEN:
            key, raw = sequence.keys[number], sequence.raw(number * size, (number + 1) * size)
            sequence.chain = self.pool.enter(int(sequence.table[number]), key, raw, sequence.chain)
            number += 1
        if sequence.chain == BROKEN:
            self.counters.collisions += 1
            sequence.border = NEVER
            self._give_up_claims(sequence)
        else:
            sequence.entered, sequence.border = number, (number + 1) * size
            if sequence.claims:
                self._give_up_claims(sequence, set(sequence.keys[:number]))

    def forget(self, sequence: Sequence) -> None:
        """Take every block out of the index that stands there under a key of this sequence."""
        self.pool.drop(block for key in sequence.keys if (block := self.pool.holds(key)) >= 0)

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives its blocks back."""
        sequence.entered, sequence.chain, sequence.border = 0, ROOT, NEVER
        self._give_up_claims(sequence)

    def _give_up_claims(self, sequence: Sequence, done: set[bytes] | None = None) -> None:
        over = sequence.claims if done is None else [key for key in sequence.claims if key in done]
        self._claimed.difference_update(over)
        sequence.claims = [] if done is None else [key for key in sequence.claims if key not in done]

    def check(self) -> None:
        """With nothing running: raises AssertionError when a claim is left."""
        assert not self._claimed, f"{len(self._claimed)} claims are left"
