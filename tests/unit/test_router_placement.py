"""The laws of placement (behaviours 35 to 38, DESIGN section 6): load is the router's own count of tokens, counted at
dispatch and given back exactly; home is kept while that is worth it; keys of other tenants and of former process
starts mean nothing; the prefix map is nested and bounded.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_proc.placement import FIRST_GUESS_TOKENS, Choice, Share
from tests.unit.placement_world import BLOCK, chain, place, placement, wanted

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
