"""Stop strings: the match that ends first, of those the longest; nothing of it is shown; any grouping is equal (29)."""

from __future__ import annotations

import time
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_proc.stops import StopMatcher, stop_set

letters = st.text("ab", max_size=40)
strings = st.lists(
    st.text("ab", min_size=1, max_size=5) | st.text("abc", min_size=1, max_size=9), min_size=1, max_size=5
)


def by_definition(text: str, stops: list[str]) -> tuple[str, int]:
    """(text before the match, characters up to its end); (text, -1) without one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], end
    return text, -1


def streamed(text: str, stops: list[str], sizes: list[int]) -> tuple[list[str], int]:
    matcher, shown, start, turn = StopMatcher(stop_set(stops)), [], 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        shown.append(matcher.feed(text[start : start + size]))
        if matcher.matched:
            return shown, start + matcher.matched_at
        start, turn = start + size, turn + 1
    shown.append(matcher.rest())
    return shown, -1


@given(text=letters, stops=strings, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_29_the_rule_in_any_grouping(text: str, stops: list[str], sizes: list[int]) -> None:
    expected, end = by_definition(text, stops)
    shown, at = streamed(text, stops, sizes)
    assert ("".join(shown), at) == (expected, end)


@pytest.mark.parametrize(
    "stops", [["bab", "a"], ["abab", "ba"], ["aab", "ab", "b"], ["abba", "bb"], ["aaa", "aa"], ["babb", "abb", "bab"]]
)
def test_29_the_rule_for_every_short_text(stops: list[str]) -> None:
    """A string that ends inside the beginning of a longer one is found too; random draws seldom come upon that."""
    for size in range(1, 8):
        for text in map("".join, product("ab", repeat=size)):
            for group in (1, 2, size):
                shown, at = streamed(text, stops, [group])
                assert ("".join(shown), at) == by_definition(text, stops), (text, group)


@given(text=letters, stops=strings)
def test_29_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stop_set(stops)), ""
    for index, character in enumerate(text):
        shown += matcher.feed(character)
        if matcher.matched:
            return
        seen = text[: index + 1]
        held = max((size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])), default=0)
        assert shown == seen[: len(seen) - held]


def test_29_the_fox() -> None:
    text = "The quick brown fox jumps over the lazy dog."
    for stops in (["own fox"], ["zebra", "own fox", "dog"], ["own fox jumps", "own fox"]):
        for size in range(1, len(text)):
            assert "".join(streamed(text, stops, [size])[0]) == "The quick br"


def test_29_time_is_linear_in_the_text() -> None:
    """Text that always almost matches costs a constant per character, not the string's length."""
    stops = ["a" * size + "b" for size in range(241, 257)]

    def seconds(count: int) -> float:
        matcher = StopMatcher(stop_set(stops))
        started = time.perf_counter()
        for _ in range(count):
            matcher.feed("a")
        return time.perf_counter() - started

    seconds(1000)
    assert seconds(20_000) < 20_000 * 20e-6


def test_characters_beyond_ascii_and_of_regular_expressions() -> None:
    for stop in ("]", "^", "-", "\\", "é", "\U0001f680", "\n\n", "a-z", "[a"):
        assert "".join(streamed(f"before{stop}after", [stop], [2])[0]) == "before"
