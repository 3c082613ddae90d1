"""Stop strings in streamed text: nothing of one is ever shown, and what cannot become one is never held back.

The rule: the match that ends first wins; of those that end at the same character, the longest. It does not depend on
how the text is cut. One automaton (Aho-Corasick) holds all strings of a request, so time is linear in the text.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache

CACHED_CHARS = 512  # sets of stop strings up to this size are kept between requests


class StopSet:
    """The automaton. State 0 is "nothing seen"; `depth[s]` characters of some string have been seen in state s."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]
        self.ends = [0]  # length of the longest string that ends in this state, 0 = none
        for string in strings:
            self._add(string)
        self._link()
        self.first = re.compile("[" + "".join(map(re.escape, sorted(self.next[0]))) + "]")

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if (following := self.next[state].get(character)) is None:
                following = len(self.next)
                self.next[state][character] = following
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.fail.append(0)
                self.ends.append(0)
            state = following
        self.ends[state] = len(string)

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            self.ends[state] = self.ends[state] or self.ends[self.fail[state]]
            for character, child in self.next[state].items():
                back = self.fail[state]
                while back and character not in self.next[back]:
                    back = self.fail[back]
                self.fail[child] = self.next[back].get(character, 0)
                queue.append(child)


@lru_cache(maxsize=128)
def _small_set(strings: tuple[str, ...]) -> StopSet:
    return StopSet(strings)


def stop_set(strings: list[str]) -> StopSet:
    """The automaton for these strings (each not empty)."""
    key = tuple(strings)
    return _small_set(key) if sum(map(len, key)) <= CACHED_CHARS else StopSet(key)


class StopMatcher:
    """One sequence's place in the automaton, and the text held back."""

    __slots__ = ("_held", "_set", "_state", "matched_at")

    def __init__(self, stops: StopSet) -> None:
        self._set = stops
        self._state = 0
        self._held = ""  # always the last depth[state] characters
        self.matched_at = -1  # after a match: characters of the last `feed` up to its end

    @property
    def matched(self) -> bool:
        return self.matched_at >= 0

    def feed(self, text: str) -> str:
        """Text that may be shown after `text` came. After a match: what stood before it, and no more is fed."""
        stops, state, position, size = self._set, self._state, 0, len(text)
        while position < size:
            if not state:
                found = stops.first.search(text, position)
                if found is None:
                    position = size
                    break
                position = found.start()
            character = text[position]
            while state and character not in stops.next[state]:
                state = stops.fail[state]
            state = stops.next[state].get(character, 0)
            position += 1
            if length := stops.ends[state]:
                self.matched_at = position
                shown = self._held + text[:position]
                self._held = ""
                return shown[: len(shown) - length]
        self._state = state
        if not state and not self._held:
            return text
        whole = self._held + text
        border = len(whole) - stops.depth[state]
        self._held = whole[border:]
        return whole[:border]

    def rest(self) -> str:
        """The text held back, when no more will come."""
        held, self._held, self._state = self._held, "", 0
        return held
