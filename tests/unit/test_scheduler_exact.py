"""What a sequence produces depends on nothing but itself: not on company, chunks, cached blocks, preemption, or depth.

52: preempted sequences equal their solo runs, there is always progress. 55: nor on colliding keys. 61: pools and
tables are checked after every step. The fake runner gives wrong ids for any wrong block (see `engine_world`).
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_proc.sequence import Sequence, State
from tests.unit.engine_world import EOS, VOCABULARY, World, expected, params, prompt_of

DEPTHS = [0, 1]


def check_ids(world: World, sequence: Sequence, prompt: list[int], count: int) -> None:
    assert world.ids[sequence.sid] == expected(prompt, count), "other ids than alone"
    assert world.ends[sequence.sid].reason == "length"


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 31, 32, 33, 100])
def test_alone(depth: int, length: int) -> None:
    world = World(depth=depth)
    prompt = prompt_of(length, length)
    sequence = world.add(prompt, params(20))
    world.run()
    check_ids(world, sequence, prompt, 20)
    assert world.runner.computed == length + 19


@pytest.mark.parametrize("depth", DEPTHS)
def test_52_four_long_sequences_in_a_pool_for_one(depth: int) -> None:
    """Each has 300 tokens; the pool has room for one and a third."""
    world = World(num_blocks=110, depth=depth)
    prompts = [prompt_of(seed, 20 + 7 * seed) for seed in range(4)]
    sequences = [world.add(prompt, params(300)) for prompt in prompts]
    world.run()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        check_ids(world, sequence, prompt, 300)
    assert world.scheduler.counters.preemptions >= 4
    assert world.ends[sequences[0].sid].usage.prompt_tokens == 20


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("moment", ["in prefill", "before the first id", "in mid-output", "twice in a row"])
def test_52_preempted_at_any_moment(depth: int, moment: str) -> None:
    world = World(depth=depth, chunk=8)
    prompt = prompt_of(5, 21)
    sequence = world.add(prompt, params(30))
    goal = {"in prefill": 0, "before the first id": 0, "in mid-output": 11, "twice in a row": 7}[moment]
    for _ in range({"in prefill": 2, "before the first id": 3 + depth}.get(moment, 0)):
        world.turn()
    while len(sequence.produced) < goal:
        world.turn()
    if moment == "in prefill":
        assert sequence.state is State.PREFILL
    usage = sequence.usage
    world.scheduler._preempt(sequence)
    if moment == "twice in a row":
        while sequence.slot < 0:
            world.turn()
        world.scheduler._preempt(sequence)
    world.run()
    check_ids(world, sequence, prompt, 30)
    assert world.ends[sequence.sid].usage == usage, "usage is that of the first admission"


def test_a_preempted_victim_keeps_the_id_of_the_step_in_flight() -> None:
    world = World(depth=1)
    prompt = prompt_of(1, 10)
    sequence = world.add(prompt, params(12))
    while len(sequence.produced) < 4:
        world.turn()
    assert sequence.last_step > world.pool.completed, "a step of it is in flight"
    world.scheduler._preempt(sequence)
    assert sequence.state is State.PREEMPTED
    assert world.scheduler.schedule() is None, "it is not rebuilt before its last id is known"
    done, fake = world.pending.popleft()
    world._take(world.scheduler.complete(done, fake.result()))
    assert len(sequence.produced) == 5
    world.run()
    check_ids(world, sequence, prompt, 12)


def test_the_id_of_the_step_in_flight_may_be_the_last_one_of_a_preempted_victim() -> None:
    prompt = prompt_of(2, 10)
    stop = expected(prompt, 5)[4]
    world = World(depth=1)
    sequence = world.add(prompt, params(12, stop_token_ids=[stop]))
    while len(sequence.produced) < 4:
        world.turn()
    world.scheduler._preempt(sequence)
    world.run()
    assert world.ids[sequence.sid] == expected(prompt, 5)
    assert world.ends[sequence.sid].reason == "stop"
    assert sequence.state is State.FINISHED


@pytest.mark.parametrize("depth", DEPTHS)
def test_resumed_at_every_id(depth: int) -> None:
    prompt, count = prompt_of(3, 14), 12
    whole = expected(prompt, count)
    for at in range(count):
        world = World(depth=depth, chunk=4)
        sequence = world.add(prompt, params(count), produced=whole[:at])
        world.run()
        check_ids(world, sequence, prompt, count)


def test_resumed_with_nothing_left_ends_at_once() -> None:
    world = World()
    sequence = world.add([5, 6, 7], params(2), produced=[8, 9])
    world.run()
    assert world.ends[sequence.sid].reason == "length"
    assert world.runner.computed == 0


def test_a_rebuild_has_two_parts() -> None:
    """The prompt as at first, then what was produced: no row has ids of both."""
    world = World(chunk=64)
    prompt = prompt_of(4, 10)
    sequence = world.add(prompt, params(20), produced=expected(prompt, 9))
    seen = []
    while sequence.state is not State.DECODE:
        step = world.scheduler.schedule()
        assert step is not None
        (row,) = step.rows
        seen.append((row.start, row.count, row.sample))
        world.scheduler.complete(step, world.runner.launch(step.plan()).result())
    assert seen == [(0, 10, False), (10, 9, True)]


@given(
    seed=st.integers(0, 2**32),
    depth=st.sampled_from(DEPTHS),
    blocks=st.integers(12, 40),
    key_bits=st.sampled_from([256, 256, 3]),
)
def test_52_55_61_any_traffic(seed: int, depth: int, blocks: int, key_bits: int) -> None:
    """Random arrivals, shared prefixes, aborts and preemptions in a small pool, the checker on."""
    source = random.Random(seed)
    world = World(
        num_blocks=blocks,
        depth=depth,
        key_bits=key_bits,
        max_running=source.randint(1, 6),
        chunk=source.choice([4, 8, 32]),
        max_bypass=source.randint(0, 4),
    )
    family = prompt_of(seed, 24)
    wanted: dict[int, tuple[list[int], int]] = {}
    aborted: set[int] = set()
    for _ in range(source.randint(1, 12)):
        prompt = family[: source.randint(1, 24)] + prompt_of(source.randrange(4), source.randint(0, 8))
        count = source.randint(1, 16)
        if not world.scheduler.fits(len(prompt) + count):
            continue
        sequence = world.add(prompt, params(count, prefix_cache=source.random() < 0.9))
        wanted[sequence.sid] = (prompt, count)
        for _ in range(source.randint(0, 4)):
            world.turn()
        if source.random() < 0.2:
            sid = source.choice(sorted(wanted))
            if world.scheduler.abort(sid):
                aborted.add(sid)
        running = world.scheduler._decoding + world.scheduler._prefilling
        if running and source.random() < 0.2:
            world.scheduler._preempt(source.choice(running))
    world.run()
    for sid, (prompt, count) in wanted.items():
        whole = expected(prompt, count)
        if sid in aborted:
            assert world.ids[sid] == whole[: len(world.ids[sid])]
            assert world.ends[sid].reason == "abort"
        else:
            assert world.ids[sid] == whole
            assert world.ends[sid].reason == "length"
    assert set(world.ends) == set(wanted)


@pytest.mark.parametrize("depth", DEPTHS)
def test_55_colliding_keys_are_misses(depth: int) -> None:
    world = World(num_blocks=60, depth=depth, key_bits=3, check=False)
    for seed in range(150):
        prompt = prompt_of(seed % 40, 17)
        sequence = world.add(prompt, params(4))
        world.run()
        check_ids(world, sequence, prompt, 4)
    assert world.prefix.counters.collisions > 0


def test_no_id_is_published_after_an_end() -> None:
    """One step ahead, the row after EOS has been launched already: it counts for nothing, and is not cached."""
    prompt = prompt_of(9, 6)
    alone = expected(prompt, 40)
    end = next(
        count for count in range(1, 40) if (len(prompt) + count) % 4 == 0 and alone.index(alone[count - 1]) == count - 1
    )
    world = World(depth=1)
    sequence = world.add(prompt, params(50, stop_token_ids=[alone[end - 1]]))
    other = world.add(prompt_of(10, 6), params(60))
    world.run()
    assert world.ids[sequence.sid] == alone[:end]
    check_ids(world, other, prompt_of(10, 6), 60)
    assert world.runner.computed > 2 * 6 + end - 1 + 59, "no row ran for nothing: this test tests nothing"
    # The last id's block became full by that row alone: it must not be found.
    world.prefix.complete_keys(sequence, (len(prompt) + end) // 4)
    assert world.pool.holds(sequence.keys[-2]) >= 0
    assert world.pool.holds(sequence.keys[-1]) < 0


def test_eos_is_out_of_the_way_in_these_tests() -> None:
    assert EOS not in expected(prompt_of(1, 4), 200)
    assert max(expected(prompt_of(1, 4), 200)) < VOCABULARY
