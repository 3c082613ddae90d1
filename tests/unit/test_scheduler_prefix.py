"""What the scheduler reuses. 57: all but keep_tokens of a prompt, in whole blocks, within a tenant."""

from __future__ import annotations

import pytest

from tests.unit.engine_world import World, expected, params, prompt_of


@pytest.mark.parametrize(
    ("length", "keep", "cached", "why"),
    [
        (3, 1, 0, ""),
        (4, 1, 0, "capped"),
        (5, 1, 4, ""),
        (8, 1, 4, "capped"),
        (9, 1, 8, ""),
        (30, 1, 28, ""),
        (16, 6, 8, "capped"),
        (18, 6, 12, "capped"),
        (22, 6, 16, "capped"),
    ],
)
def test_57_all_but_keep_tokens_are_reused(length: int, keep: int, cached: int, why: str) -> None:
    world = World(keep_tokens=keep)
    prompt = prompt_of(length, length)
    sequences = []
    for _ in range(2):
        sequences.append(world.add(prompt, params(3)))
        world.run()
        assert world.ids[sequences[-1].sid] == expected(prompt, 3)
    cold, again = (world.ends[sequence.sid].usage for sequence in sequences)
    assert (cold.cached_tokens, cold.miss_reason) == (0, "cold" if length >= 4 else "")
    assert (again.cached_tokens, again.device_tokens, again.host_tokens, again.miss_reason) == (cached, cached, 0, why)
    assert world.runner.computed == 2 * (length + 2) - cached
    assert world.prefix.counters.queried_tokens == 2 * length
    assert world.prefix.counters.reused_tokens == cached


def test_57_keep_tokens_zero_means_no_cache() -> None:
    world = World(keep_tokens=0)
    for _ in range(2):
        sequence = world.add(prompt_of(1, 20), params(2))
        world.run()
        assert world.ends[sequence.sid].usage.miss_reason == "disabled"
    assert world.pool.counts().free == 64


@pytest.mark.parametrize("of", ["request", "engine"])
def test_57_a_cache_that_is_off_is_neither_read_nor_written(of: str) -> None:
    world = World(prefix_cache=of != "engine")
    wish = params(2, prefix_cache=of != "request")
    world.add(prompt_of(1, 20), wish)
    world.run()
    assert world.pool.counts().free == 64
    if of == "request":
        world.add(prompt_of(1, 20), params(2))
        world.run()
        sequence = world.add(prompt_of(1, 20), wish)
        world.run()
        assert world.ends[sequence.sid].usage.cached_tokens == 0


def test_57_a_conversation_finds_what_was_produced() -> None:
    """Also when its first prompt had no full block: then the first key comes from the root."""
    world = World()
    prompt = prompt_of(1, 3)
    world.add(prompt, params(18))
    world.run()
    longer = prompt + expected(prompt, 18) + prompt_of(2, 5)
    sequence = world.add(longer, params(1))
    world.run()
    assert world.ends[sequence.sid].usage.cached_tokens == 20
    assert world.ids[sequence.sid] == expected(longer, 1)


def test_57_tenants_share_nothing() -> None:
    world = World()
    for tenant, cached in (("a", 0), ("b", 0), ("a", 16), ("b", 16)):
        sequence = world.add(prompt_of(1, 20), params(1), tenant=tenant)
        world.run()
        assert world.ends[sequence.sid].usage.cached_tokens == cached


def test_57_tenants_share_nothing_that_was_produced() -> None:
    """Without a full block in the prompt every key of the chain is made here."""
    world = World()
    prompt = prompt_of(1, 3)
    for tenant in ("a", "b"):
        world.add(prompt, params(18), tenant=tenant)
        world.run()
    longer = prompt + expected(prompt, 18) + [5]
    for tenant, cached in (("a", 20), ("b", 20), ("c", 0)):
        sequence = world.add(longer, params(1), tenant=tenant)
        world.run()
        assert world.ends[sequence.sid].usage.cached_tokens == cached


def test_57_usage_tells_what_was_evicted() -> None:
    world = World(num_blocks=6)
    for seed in (1, 2, 1):
        sequence = world.add(prompt_of(seed, 20), params(1))
        world.run()
    usage = world.ends[sequence.sid].usage
    assert (usage.cached_tokens, usage.miss_reason) == (4, "evicted"), "only its last blocks were taken"
    late = world.add(prompt_of(1, 16) + prompt_of(5, 4), params(1))
    world.run()
    assert (world.ends[late.sid].usage.cached_tokens, world.ends[late.sid].usage.miss_reason) == (16, "")


def test_a_prefix_is_computed_once_for_all_who_arrive_together() -> None:
    world = World(chunk=16, num_blocks=200)
    prompt = prompt_of(1, 41)
    sequences = [world.add(prompt, params(2)) for _ in range(5)]
    world.run()
    assert [world.ends[sequence.sid].usage.cached_tokens for sequence in sequences] == [0, 40, 40, 40, 40]
    assert world.runner.computed == 41 + 4 + 5
    assert {tuple(world.ids[sequence.sid]) for sequence in sequences} == {tuple(expected(prompt, 2))}


def test_who_waits_for_a_prefix_goes_on_when_its_maker_is_gone() -> None:
    world = World(chunk=4)
    first = world.add(prompt_of(1, 41), params(2))
    second = world.add(prompt_of(1, 41), params(2))
    for _ in range(3):
        world.turn()
    assert second.slot < 0
    world.scheduler.abort(first.sid)
    world.run()
    assert world.ids[second.sid] == expected(prompt_of(1, 41), 2)
    assert world.ends[second.sid].usage.cached_tokens == 12
