"""The prefix map: which rank was last given which chain of blocks. Pure: no sockets, no clock.

A key is in the map only together with all keys before it in its chain (keys are chained hashes, so each has one
parent): a chain is refreshed from its last block to its first, and the oldest entry is evicted first. Therefore the
longest known part of a chain is found by bisection.
"""

from __future__ import annotations

from collections import OrderedDict

from wire.keys import KEY_BYTES

SLOT_BITS = 16
SLOT_MASK = (1 << SLOT_BITS) - 1
MAX_SLOTS = 4096


class PrefixMap:
    """Block key → the ranks that were given its chain, and the last of them.

    A rank's process start is a *slot*: a small number, never used twice while entries of it may be here. An entry is
    an int: the last slot in its low bits, above them one bit for each slot.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: keys that are kept at most."""
        self.capacity = capacity
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._next_slot = 0
        self._live = 0  # bits of the slots that are in rotation

    def __len__(self) -> int:
        return len(self._entries)

    def new_slot(self) -> int | None:
        """A number for a rank's process start; None when all are used: `clear` and number all anew."""
        if self._next_slot == MAX_SLOTS:
            return None
        self._next_slot += 1
        return self._next_slot - 1

    def clear(self) -> None:
        self._entries.clear()
        self._next_slot, self._live = 0, 0

    def revive(self, slot: int) -> None:
        """Entries of this slot count."""
        self._live |= 1 << (slot + SLOT_BITS)

    def retire(self, slot: int) -> None:
        """Entries of this slot count as absent."""
        self._live &= ~(1 << (slot + SLOT_BITS))

    def depth(self, keys: bytes, slot: int = -1, at_most: int = 1 << 62) -> int:
        """Number of leading blocks of a chain that `slot` was given (at most `at_most`); -1 = any live slot."""
        mask = self._live if slot < 0 else self._live & (1 << (slot + SLOT_BITS))
        entries, low, high = self._entries, 0, min(at_most, len(keys) // KEY_BYTES)
        while low < high:
            middle = (low + high + 1) >> 1
            if entries.get(keys[(middle - 1) * KEY_BYTES : middle * KEY_BYTES], 0) & mask:
                low = middle
            else:
                high = middle - 1
        return low

    def holders(self, keys: bytes, depth: int) -> list[int]:
        """Of block `depth` - 1: the slot it was last given to, or all that are live when that one is not."""
        entry = self._entries.get(keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES], 0)
        last, live = entry & SLOT_MASK, (entry & self._live) >> SLOT_BITS
        if live >> last & 1:
            return [last]
        slots = []
        while live:
            bit = live & -live
            slots.append(bit.bit_length() - 1)
            live ^= bit
        return slots

    def touch(self, keys: bytes, slot: int) -> None:
        """The chain was given to `slot`: insert and refresh it, last block first."""
        entries, mark = self._entries, (1 << (slot + SLOT_BITS)) | slot
        get, refresh = entries.get, entries.move_to_end
        for start in range(len(keys) - KEY_BYTES, -1, -KEY_BYTES):
            key = keys[start : start + KEY_BYTES]
            entries[key] = (get(key, 0) | SLOT_MASK) ^ SLOT_MASK | mark
            refresh(key)
        while len(entries) > self.capacity:
            entries.popitem(last=False)

    def check(self) -> None:
        """Raises AssertionError when the map is over its bound."""
        assert len(self._entries) <= self.capacity, "the prefix map is larger than its bound"
