"""The device block pool: references, the prefix index, the LRU of cached blocks, and the step fence.

Every block is in exactly one of four places: free; in use (referenced by sequences); cached (referenced by nobody,
found through the index); fenced (given back, but a launched step may still touch it). A block is handed out only
when the last step that was launched before it was given back has completed; that is checked at each hand-out.

An index entry names its block by key, and is valid only for the ids it was computed from: a match compares the ids
of the block and the entry that stood before it, so equal keys of different prefixes never meet.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ROOT = 0  # uid of the parent of a first block
BROKEN = -1  # uid of a chain that cannot be entered any further
REMEMBERED = 65_536  # keys of evicted blocks, kept to say why a prefix was not found


class PoolError(Exception):
    """A fault of the engine itself: a block in two places, or handed out too early."""


@dataclass(slots=True)
class Entry:
    """A block in the index: the ids it holds (raw int32), and the entry that holds the block before it."""

    key: bytes
    ids: bytes
    uid: int
    parent: int


@dataclass(slots=True)
class Match:
    """Blocks that hold a prompt's beginning. `collided`: the walk ended at a key of other ids."""

    blocks: list[int]
    chain: int  # uid of the last one
    collided: bool


@dataclass(slots=True)
class Counts:
    """How many blocks are where."""

    total: int
    free: int
    cached: int
    pinned: int
    fenced: int


class BlockPool:
    """Numbers of blocks only: their memory belongs to the runner."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.launched = self.completed = 0  # step numbers
        self.evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._fenced: deque[tuple[int, int]] = deque()  # (step, block), steps ascending
        self._refs = [0] * num_blocks
        self._fence = [0] * num_blocks  # the step that must have completed before the block is handed out
        self._entries: list[Entry | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._live: set[int] = {ROOT}  # uids of entries
        self._next_uid = ROOT
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    # --- steps ----------------------------------------------------------------------------------------------------

    def launch(self) -> int:
        """A step is about to be launched: its number."""
        self.launched += 1
        return self.launched

    def complete(self, step: int) -> None:
        """A step, and all before it, will touch no block any more."""
        self.completed = step
        fenced = self._fenced
        while fenced and fenced[0][0] <= step:
            self._free.append(fenced.popleft()[1])

    # --- giving and taking ----------------------------------------------------------------------------------------

    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        ready = len(self._cached)
        if self.launched > self.completed:  # the most recently used ones may still be read
            for block in reversed(self._cached):
                if self._fence[block] <= self.completed:
                    break
                ready -= 1
        return len(self._free) + ready

    def coming(self) -> int:
        """Blocks that nobody uses and that will be available once the launched steps have completed."""
        if self.launched == self.completed:
            return 0
        return len(self._free) + len(self._cached) + len(self._fenced) - self.available()

    def allocate(self, count: int) -> list[int]:
        """Blocks with one reference each. Raises PoolError when they are not available."""
        found = [self._take() for _ in range(count)]
        for block in found:
            self._refs[block] = 1
        return found

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            entry = self._entries[block]
            assert entry is not None, "a cached block without an entry"
            self._forget(block, entry)
            self.evictions += 1
        else:
            raise PoolError("no block is available")
        if self._fence[block] > self.completed:
            raise PoolError(f"block {block} is handed out before step {self._fence[block]} has completed")
        if self._refs[block]:
            raise PoolError(f"block {block} is handed out while it is in use")
        return block

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to blocks that a match has found."""
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `available` counts: an acquire takes them from there."""
        return sum(not self._refs[block] and self._fence[block] <= self.completed for block in blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference each. Later blocks of a prefix are evicted before earlier ones."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._fence[block] = self.launched
                if self._entries[block] is not None:
                    self._cached[block] = None
                else:
                    self._put_aside(block)
            elif self._refs[block] < 0:
                raise PoolError(f"block {block} is given back more often than it was taken")

    def _put_aside(self, block: int) -> None:
        """An unreferenced block without an entry: free once no step can touch it."""
        if self._fence[block] > self.completed:
            # Steps ascend in the queue, and this one may be older: a later step is always a safe fence.
            self._fence[block] = self.launched
            self._fenced.append((self.launched, block))
        else:
            self._free.append(block)

    # --- index ----------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], ids: bytes, most: int) -> Match:
        """The longest chain of at most `most` blocks for a prompt `ids` (raw int32). Changes nothing."""
        found: list[int] = []
        parent, step = ROOT, 4 * self.block_tokens
        for number in range(min(most, len(keys))):
            block = self._index.get(keys[number])
            if block is None:
                break
            entry = self._entries[block]
            assert entry is not None, "an index entry without its block"
            if entry.parent != parent or entry.ids != ids[step * number : step * (number + 1)]:
                return Match(found, parent, entry.parent in self._live)
            found.append(block)
            parent = entry.uid
        return Match(found, parent, False)

    def enter(self, block: int, key: bytes, ids: bytes, parent: int) -> int:
        """Enter a full, computed block that follows the entry `parent`; → uid of the entry that now stands for it.

        That is an older entry if it holds the same (then the block is a copy and stays out), and BROKEN if the key
        belongs to other ids.
        """
        if parent not in self._live:
            return BROKEN
        known = self._index.get(key)
        if known is not None:
            entry = self._entries[known]
            assert entry is not None, "an index entry without its block"
            if entry.parent == parent and entry.ids == ids:
                return entry.uid
            if entry.parent in self._live:
                return BROKEN
            self._drop(known, entry)  # its prefix is gone: nobody can find it any more
        self._next_uid += 1
        self._entries[block] = Entry(key, ids, self._next_uid, parent)
        self._index[key] = block
        self._live.add(self._next_uid)
        return self._next_uid

    def drop(self, blocks: Iterable[int]) -> int:
        """Take blocks out of the index, whoever uses them; → how many were in it."""
        found = [(block, entry) for block in blocks if (entry := self._entries[block]) is not None]
        for block, entry in found:
            self._drop(block, entry)
        return len(found)

    def flush(self) -> int:
        """Drop every cached block that nobody uses; → their number."""
        return self.drop(list(self._cached))

    def holds(self, key: bytes) -> int:
        """The block that stands in the index under this key, -1 for none."""
        return self._index.get(key, -1)

    def newest(self) -> int:
        """The cached block that was used last, -1 for none."""
        return next(reversed(self._cached), -1)

    def was_evicted(self, key: bytes) -> bool:
        """Whether this key was in the index not long ago."""
        return key in self._evicted

    def _drop(self, block: int, entry: Entry) -> None:
        self._forget(block, entry)
        if not self._refs[block]:
            del self._cached[block]
            self._put_aside(block)

    def _forget(self, block: int, entry: Entry) -> None:
        self._entries[block] = None
        self._live.discard(entry.uid)
        del self._index[entry.key]
        self._evicted[entry.key] = None
        if len(self._evicted) > REMEMBERED:
            self._evicted.popitem(last=False)

    # --- integrity ------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        free, cached, fenced = len(self._free), len(self._cached), len(self._fenced)
        return Counts(self.num_blocks, free, cached, self.num_blocks - free - cached - fenced, fenced)

    def check(self, references: Iterable[Sequence[int]]) -> None:
        """Raises PoolError unless every block is in exactly one place and has the references of these tables."""
        refs = np.array(self._refs, np.int64)
        places = np.zeros(self.num_blocks, np.int64)
        for name, found in (
            ("free", self._free),
            ("cached", list(self._cached)),
            ("fenced", [block for _, block in self._fenced]),
        ):
            blocks = np.array(found, np.int64)
            np.add.at(places, blocks, 1)
            if refs[blocks].any():
                raise PoolError(f"a {name} block is in use")
        wrong = np.flatnonzero(places + (refs > 0) != 1)
        if len(wrong):
            raise PoolError(f"block {wrong[0]} is in {places[wrong[0]]} places with {refs[wrong[0]]} references")
        expected = np.zeros(self.num_blocks, np.int64)
        for table in references:
            np.add.at(expected, np.asarray(table, np.int64), 1)
        wrong = np.flatnonzero(expected != refs)
        if len(wrong):
            raise PoolError(f"block {wrong[0]} has {refs[wrong[0]]} references, not {expected[wrong[0]]}")
        self._check_index()

    def _check_index(self) -> None:
        entries = {block: entry for block, entry in enumerate(self._entries) if entry is not None}
        if {entry.key: block for block, entry in entries.items()} != self._index:
            raise PoolError("the index does not name the blocks that have entries")
        if {entry.uid for entry in entries.values()} | {ROOT} != self._live:
            raise PoolError("the set of live entries is wrong")
        if any(block not in entries for block in self._cached):
            raise PoolError("a cached block has no entry")
        fences = [self._fence[block] for block in self._cached]
        steps = [step for step, _ in self._fenced]
        if fences != sorted(fences) or steps != sorted(steps):
            raise PoolError("fences are out of order")
        if any(self._fence[block] > self.completed for block in self._free):
            raise PoolError("a free block may still be touched")
