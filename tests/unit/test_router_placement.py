"""The laws of placement (behaviours 35 to 38, DESIGN section 6): load is the router's own count of tokens, counted at
dispatch and given back exactly; home is kept while that is worth it; keys of other tenants and of former process
starts mean nothing; the prefix map is nested and bounded.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_proc.placement import FIRST_GUESS_TOKENS, MAX_HOMES, Choice, Placement, Share, Wanted
from router_proc.prefix_map import MAX_SLOTS, PrefixMap

BLOCK = 128


def chain(seed: int, blocks: int, parent: bytes = b"") -> bytes:
    """Keys of a chain of blocks that only this seed has."""
    found, key = [], parent
    for number in range(blocks):
        key = hashlib.sha256(key + seed.to_bytes(8, "little") + bytes([number & 255])).digest()
        found.append(key)
    return b"".join(found)


def placement(ranks: int = 2, routing: str = "affinity", slack: int = 8192, keep: int = 1) -> Placement:
    found = Placement(ranks, routing, slack)
    for rank in range(ranks):
        found.ready(rank, 100 + rank, BLOCK, keep, 65_536)
    return found


def wanted(tokens: int = 40, max_tokens: int = 100, keys: bytes = b"", tenant: str = "", **fields: Any) -> Wanted:
    return Wanted(tenant, keys, tokens, max_tokens, **fields)


def place(found: Placement, request: Wanted) -> tuple[Choice, list[Share]]:
    choice = found.choose(request)
    assert choice is not None
    return choice, found.dispatched(request, choice)


# --- 35, 36, 37: even by the router's own count -----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("routing", ["affinity", "least-loaded"])
def test_35_a_burst_of_unrelated_prompts_spreads_evenly(ranks: int, routing: str) -> None:
    found = placement(ranks, routing)
    counts = Counter(
        place(found, wanted(300, keys=chain(number, 2), first_hash=number.to_bytes(16, "little")))[0].rank
        for number in range(100 * ranks)
    )
    assert all(counts[rank] == 100 for rank in range(ranks)), counts


@given(st.integers(0, 2**32))
def test_35_progress_in_jumps_does_not_upset_the_spread(seed: int) -> None:
    """Ranks step at the same pace and at different moments while a burst comes in: all get the same number."""
    source = random.Random(seed)
    found, ranks, each, period = placement(4), 4, 25, 20
    there: list[list[Share]] = [[] for _ in range(ranks)]
    phases = [source.randrange(period) for _ in range(ranks)]
    for number in range(each * ranks):
        choice, shares = place(found, wanted(40, 20))
        there[choice.rank] += shares
        for rank in [rank for rank in range(ranks) if number % period == phases[rank]]:
            for share in there[rank]:
                found.prefilled(share)
                if share.output_left:
                    share.output_left -= 1
                    found.lower(rank, 1)
    assert all(abs(len(shares) - each) <= 1 for shares in there), [len(shares) for shares in there]


def test_38_a_heavy_request_goes_on_weighing_while_it_decodes() -> None:
    found = placement()
    home, (share,) = place(found, wanted(10_000, 100))
    found.prefilled(share)
    assert [place(found, wanted(1000, 100))[0].rank for _ in range(2)] == [1 - home.rank] * 2


def test_a_rank_with_much_less_left_is_taken_whatever_it_was_given() -> None:
    found = placement()
    busy, (share,) = place(found, wanted(9000, 10))
    found.prefilled(share)
    place(found, wanted(5000, 10))
    assert found.loads[busy.rank] < 100 < found.loads[1 - busy.rank]
    assert place(found, wanted(50, 10))[0].rank == busy.rank


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_37_what_ends_is_given_back_exactly(seed: int, ranks: int) -> None:
    """Any order of dispatch, first id, ids, end and loss: without sequences all counts are zero, and spread is even."""
    source = random.Random(seed)
    found = placement(ranks)
    live: list[Share] = []
    generation = 1000
    for _ in range(200):
        action = source.randrange(6)
        if action <= 1 or not live:
            keys = chain(source.randrange(6), source.randrange(0, 5))
            request = wanted(
                len(keys) // 32 * BLOCK + source.randrange(1, 400),
                source.randrange(1, 3000),
                keys,
                n=source.randrange(1, 4),
                session_key=source.choice(["", "a", "b"]),
            )
            choice = found.choose(request)
            if choice is not None:
                live += found.dispatched(request, choice)
        elif action == 2:
            found.prefilled(source.choice(live))
        elif action == 3:
            share = source.choice(live)
            if share.output_left:
                share.output_left -= 1
                found.lower(share.rank, 1)
        elif action == 4:
            found.release(live.pop(source.randrange(len(live))), source.randrange(0, 50))
        elif source.random() < 0.2:  # a rank is lost: its sequences are released after that
            rank = source.randrange(ranks)
            found.lost(rank)
            for share in [share for share in live if share.rank == rank]:
                live.remove(share)
                found.release(share)
            generation += 1
            found.ready(rank, generation, BLOCK, 1, 65_536)
        assert all(load >= 0 for load in found.loads), found.loads
    for share in live:
        found.release(share)
    found.check()
    counts = Counter(place(found, wanted())[0].rank for _ in range(10 * ranks))
    assert set(counts.values()) == {10}


def test_37_release_is_idempotent() -> None:
    found = placement(1)
    _, (share,) = place(found, wanted())
    found.release(share, 5)
    found.release(share)
    found.check()


def test_late_events_of_a_lost_rank_do_not_touch_its_next_start() -> None:
    found = placement(2)
    _, (share,) = place(found, wanted(500))
    found.lost(share.rank)
    found.ready(share.rank, 999, BLOCK, 1, 65_536)
    found.prefilled(share)
    found.release(share)
    found.check()


@pytest.mark.parametrize("routing", ["affinity", "least-loaded"])
def test_ties_rotate(routing: str) -> None:
    """One request after the other, each alone in the service."""
    found, ranks = placement(3, routing), []
    for number in range(9):
        choice, (share,) = place(found, wanted(300, keys=chain(number, 2)))
        ranks.append(choice.rank)
        found.release(share, 5)
    assert ranks == [0, 1, 2] * 3


# --- 38: tokens and homes ---------------------------------------------------------------------------------------------


def test_38_one_long_prompt_weighs_more_than_two_short_ones() -> None:
    found = placement()
    home = place(found, wanted(10_000, 10))[0].rank
    assert [place(found, wanted(1000, 10))[0].rank for _ in range(3)] == [1 - home] * 3


def test_load_is_uncached_prompt_plus_expected_output() -> None:
    found = placement(1)
    keys = chain(1, 10)
    place(found, wanted(1290, 50, keys))
    assert found.loads == [1290 + 50]
    choice, (share,) = place(found, wanted(1290, 5000, keys))
    assert choice.cached_tokens == 1280
    assert (share.prompt_left, share.output_left) == (10, FIRST_GUESS_TOKENS)
    assert found.loads == [1340 + 10 + FIRST_GUESS_TOKENS]
    found.prefilled(share)
    assert found.loads == [1340 + FIRST_GUESS_TOKENS]


def test_expected_output_is_the_mean_of_what_came() -> None:
    found = placement(1)
    for produced in (10, 30):
        _, (share,) = place(found, wanted(10, 5000))
        found.release(share, produced)
    _, (share,) = place(found, wanted(10, 5000))
    assert share.output_left == 20
    _, (share,) = place(found, wanted(10, 7))
    assert share.output_left == 7


def test_further_choices_share_the_prompt() -> None:
    found = placement(1)
    _, shares = place(found, wanted(300, 50, chain(1, 2), n=3))
    assert [share.prompt_left for share in shares] == [300, 44, 44]
    assert found.weights == found.loads == [300 + 44 + 44 + 150]


@pytest.mark.parametrize(("tokens", "keep", "cached"), [(256, 1, 128), (257, 1, 256), (600, 140, 384), (600, 0, 0)])
def test_the_cap_and_the_snap_hold_for_estimates(tokens: int, keep: int, cached: int) -> None:
    found = placement(1, keep=keep)
    keys = chain(1, tokens // BLOCK)
    place(found, wanted(tokens, 10, keys))
    assert place(found, wanted(tokens, 10, keys))[0].cached_tokens == cached


def test_38_home_is_left_only_above_the_slack() -> None:
    slack, keys = 3000, chain(1, 2)
    found = placement(2, slack=slack)
    home = place(found, wanted(300, 500, keys))[0].rank
    for _ in range(20):
        before = found.loads[home] - found.loads[1 - home]
        choice, _ = place(found, wanted(300, 500, keys))
        assert (choice.rank == home) == (before <= slack)
        if choice.rank != home:
            break
    else:
        raise AssertionError("home is never left")
    assert choice.reason == "least-loaded"
    assert place(found, wanted(300, 500, keys))[0].rank == choice.rank, "the chain was last given to the other rank"


def test_38_home_is_kept_while_moving_would_cost_more() -> None:
    found = placement(2, slack=1000)
    keys = chain(1, 100)  # 12,800 tokens
    home = place(found, wanted(12_810, 10, keys))[0].rank
    seen = []
    found.lower(home, 12_810)
    while found.loads[home] - found.loads[1 - home] <= 12_800:
        seen.append(place(found, wanted(12_810, 500, keys))[0].rank)
    assert set(seen) == {home}
    assert len(seen) > 1
    assert place(found, wanted(12_810, 500, keys))[0].rank == 1 - home


def test_38_what_the_other_rank_holds_counts() -> None:
    """Both ranks hold the long prefix: only the slack keeps a request at home."""
    found = placement(2, slack=1000)
    keys = chain(1, 100)
    shares = []
    for rank in (1, 0):
        shares += found.dispatched(wanted(12_810, 10, keys), Choice(rank, "least-loaded", 0))
    for share in shares:
        found.release(share)
    assert place(found, wanted(12_810, 800, keys))[0].reason == "prefix"
    assert found.loads == [810, 0]
    place(found, wanted(12_810, 800, keys))
    assert found.loads[0] > 1000
    moved = place(found, wanted(12_810, 800, keys))[0]
    assert (moved.rank, moved.cached_tokens) == (1, 12_800)


def test_a_conversation_goes_where_its_longest_part_lies() -> None:
    found = placement(3)
    system = chain(1, 4)
    ranks = []
    for talk in range(3):
        keys = system + chain(10 + talk, 6, system[-32:])
        choice = Choice(talk, "least-loaded", 0)
        for share in found.dispatched(wanted(1290, 10, keys), choice):
            found.release(share)
        ranks.append(choice.rank)
    for talk in range(3):
        keys = system + chain(10 + talk, 6, system[-32:])
        keys += chain(20 + talk, 3, keys[-32:])
        choice, _ = place(found, wanted(13 * BLOCK + 5, 10, keys))
        assert (choice.rank, choice.reason) == (ranks[talk], "prefix")
        assert choice.cached_tokens == 10 * BLOCK
    new = system + chain(99, 6, system[-32:])
    assert place(found, wanted(1290, 10, new))[0].rank == 2, "the shared part was last given to this rank"


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
