"""The laws of homes (DESIGN section 6): session before prefix before user and first message, scoped by tenant; former
process starts count as absent; the prefix map is nested and bounded.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_proc.placement import MAX_HOMES, Choice
from router_proc.prefix_map import MAX_SLOTS, PrefixMap
from tests.unit.placement_world import BLOCK, chain, place, placement, wanted

# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_session_goes_before_the_prefix_and_that_before_the_first_message() -> None:
    found = placement(3)
    keys = chain(1, 4)
    found.dispatched(wanted(session_key="s"), Choice(0, "least-loaded", 0))
    found.dispatched(wanted(520, keys=keys), Choice(1, "least-loaded", 0))
    found.dispatched(wanted(first_hash=b"f" * 16), Choice(2, "least-loaded", 0))

    def where(**fields: Any) -> tuple[int, str]:
        choice = found.choose(wanted(520, **fields))
        assert choice is not None
        return choice.rank, choice.reason

    assert where(session_key="s", keys=keys, first_hash=b"f" * 16) == (0, "session")
    assert where(session_key="new", keys=keys, first_hash=b"f" * 16) == (1, "prefix")
    assert where(keys=chain(2, 4), first_hash=b"f" * 16) == (2, "first-message")


def test_the_user_goes_before_the_first_message() -> None:
    found = placement(2)
    found.dispatched(wanted(user="u", first_hash=b"a" * 16), Choice(0, "least-loaded", 0))
    found.dispatched(wanted(first_hash=b"b" * 16), Choice(1, "least-loaded", 0))
    choice = found.choose(wanted(user="u", first_hash=b"b" * 16))
    assert choice is not None
    assert choice.rank == 0
    other = found.choose(wanted(user="new", first_hash=b"b" * 16))
    assert other is not None
    assert other.reason == "least-loaded"


def test_a_session_that_moved_stays_where_it_moved_to() -> None:
    found = placement(2, slack=100)
    home = place(found, wanted(10, 200, session_key="s"))[0].rank
    moved = place(found, wanted(10, 200, session_key="s"))[0]
    assert moved.rank == 1 - home
    found.lower(home, int(found.loads[home]))
    assert found.loads[home] == 0
    found.lower(moved.rank, int(found.loads[moved.rank]) - 50)
    assert place(found, wanted(10, 10, session_key="s"))[0].rank == moved.rank


@pytest.mark.parametrize("field", ["session_key", "user"])
def test_92_keys_of_another_tenant_mean_nothing(field: str) -> None:
    found = placement(4)
    named: dict[str, Any] = {field: "same"}
    found.dispatched(wanted(tenant="a", **named), Choice(2, "least-loaded", 0))
    mine, other = (
        found.choose(wanted(tenant="a", **named)),
        found.choose(wanted(tenant="b", **named)),
    )
    assert mine is not None
    assert other is not None
    assert mine.rank == 2
    assert other.reason == "least-loaded"


def test_a_former_process_start_counts_as_absent() -> None:
    found = placement(2)
    keys = chain(1, 4)
    request = wanted(520, 10, keys, session_key="s", first_hash=b"f" * 16)
    home = place(found, request)[0].rank
    found.lost(home)
    away = found.choose(request)
    assert away is not None
    assert (away.rank, away.reason, away.cached_tokens) == (1 - home, "least-loaded", 0)
    found.ready(home, 7, BLOCK, 1, 65_536)
    choice = found.choose(request)
    assert choice is not None
    assert (choice.reason, choice.cached_tokens) == ("least-loaded", 0)


def test_a_process_that_was_only_silent_keeps_its_prefixes() -> None:
    found = placement(2)
    request = wanted(520, 10, chain(1, 4))
    home = place(found, request)[0].rank
    found.lost(home)
    found.ready(home, 100 + home, BLOCK, 1, 65_536)
    choice = found.choose(request)
    assert choice is not None
    assert (choice.rank, choice.reason, choice.cached_tokens) == (home, "prefix", 512)


def test_when_the_last_holder_is_gone_another_one_is_home() -> None:
    found = placement(3)
    request = wanted(520, 10, chain(1, 4))
    for rank in (2, 1):
        for share in found.dispatched(request, Choice(rank, "least-loaded", 0)):
            found.release(share)
    found.lost(1)
    choice = found.choose(request)
    assert choice is not None
    assert (choice.rank, choice.reason) == (2, "prefix")


def test_least_loaded_routing_ignores_keys() -> None:
    found = placement(2, "least-loaded")
    request = wanted(520, 10, chain(1, 4), session_key="s", user="u", first_hash=b"f" * 16)
    choices = [place(found, request)[0] for _ in range(4)]
    assert [choice.rank for choice in choices] == [0, 1, 0, 1]
    assert {choice.reason for choice in choices} == {"least-loaded"}
    assert found.homes == len(found.map) == 0


def test_a_request_without_prefix_cache_neither_finds_nor_leaves_a_prefix() -> None:
    found = placement(2)
    keys = chain(1, 4)
    place(found, wanted(520, 10, keys, prefix_cache=False))
    assert len(found.map) == 0
    place(found, wanted(520, 10, keys))
    choice = found.choose(wanted(520, 10, keys, prefix_cache=False))
    assert choice is not None
    assert (choice.reason, choice.cached_tokens) == ("least-loaded", 0)


def test_choosing_changes_nothing() -> None:
    found = placement(2)
    before = list(found.loads)
    for _ in range(3):
        choice = found.choose(wanted(520, 10, chain(1, 4), session_key="s"))
        assert choice is not None
        assert choice.rank == 0
    assert (found.loads, found.homes, len(found.map)) == (before, 0, 0)


def test_41_without_a_rank_there_is_no_choice() -> None:
    found = placement(2)
    found.lost(0)
    choice = found.choose(wanted())
    assert choice is not None
    assert choice.rank == 1
    assert found.choose(wanted(), avoid=[1]) is None
    found.lost(1)
    assert found.choose(wanted()) is None
    assert found.loads == [math.inf, math.inf]


def test_a_rank_to_avoid_is_no_home() -> None:
    found = placement(2)
    request = wanted(520, 10, chain(1, 4), session_key="s")
    home = place(found, request)[0].rank
    choice = found.choose(request, avoid=[home])
    assert choice is not None
    assert choice.rank == 1 - home


def test_homes_are_bounded() -> None:
    found = placement(1)
    for number in range(MAX_HOMES + 100):
        found._remember(wanted(session_key=str(number)), 0)
    assert found.homes == MAX_HOMES
    assert ("", "session", "0") not in found._homes
    assert ("", "session", str(MAX_HOMES + 99)) in found._homes


def test_thousands_of_restarts_forget_and_go_on() -> None:
    found = placement(2)
    keys = chain(1, 4)
    for generation in range(MAX_SLOTS + 10):
        found.lost(0)
        found.ready(0, 10_000 + generation, BLOCK, 1, 65_536)
    home, shares = place(found, wanted(520, 10, keys))
    for generation in range(MAX_SLOTS + 10):  # on the other rank: what is under way here stays counted
        found.lost(1 - home.rank)
        found.ready(1 - home.rank, 20_000 + generation, BLOCK, 1, 65_536)
    found.release(shares[0])
    found.check()
    home = place(found, wanted(520, 10, keys))[0]
    assert place(found, wanted(520, 10, keys))[0] == Choice(home.rank, "prefix", 512)


# --- the prefix map ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_the_map_is_nested_and_bounded_and_bisection_finds_the_depth(seed: int) -> None:
    """Against a plain walk from the start, with branching chains, eviction, and slots that come and go."""
    source = random.Random(seed)
    found = PrefixMap(40)
    slots = [found.new_slot() for _ in range(3)]
    live = set()
    trunk = chain(0, 8)
    chains = [trunk] + [
        trunk[: 32 * cut] + chain(5 + cut, 12 - cut, trunk[32 * cut - 32 : 32 * cut]) for cut in (2, 4, 7)
    ]
    chains += [chain(100 + number, 10) for number in range(4)]
    for _ in range(60):
        slot = source.choice(slots)
        assert slot is not None
        if source.random() < 0.15:
            live.discard(slot)
            found.retire(slot)
        else:
            live.add(slot)
            found.revive(slot)
            keys = source.choice(chains)
            found.touch(keys[: 32 * source.randrange(1, len(keys) // 32 + 1)], slot)
        found.check()
        for keys in chains:
            for asked in (-1, *slots):
                assert asked is not None
                held = [
                    bool(_slots_of(found, keys[at : at + 32]) & (live if asked < 0 else live & {asked}))
                    for at in range(0, len(keys), 32)
                ]
                assert held == sorted(held, reverse=True), "a key is here without the keys before it"
                assert found.depth(keys, asked) == sum(held)


def _slots_of(found: PrefixMap, key: bytes) -> set[int]:
    bits = found._entries.get(key, 0) >> 16
    return {slot for slot in range(bits.bit_length()) if bits >> slot & 1}


def test_the_last_holder_is_told_apart() -> None:
    found = PrefixMap(100)
    for slot in range(3):
        found.new_slot()
        found.revive(slot)
    keys = chain(1, 3)
    for slot in (1, 2, 0):
        found.touch(keys, slot)
    assert found.holders(keys, 3) == [0]
    found.retire(0)
    assert found.holders(keys, 3) == [1, 2]


def test_a_chain_longer_than_the_map_keeps_its_start() -> None:
    found = PrefixMap(5)
    found.new_slot()
    found.revive(0)
    keys = chain(1, 9)
    found.touch(keys, 0)
    assert found.depth(keys) == 5
