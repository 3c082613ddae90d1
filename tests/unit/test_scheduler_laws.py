"""Who runs when: budget, order, bounded bypass, room in the pool.

45: a large sequence is passed by at most max_bypass others. 44: what can never fit is refused.
"""

from __future__ import annotations

import pytest

from engine_proc.plan import StepPlan
from engine_proc.prefix import Hit
from engine_proc.sequence import Sequence
from tests.unit.engine_world import World, expected, params, prompt_of

DEPTHS = [0, 1]


def plan_of(world: World) -> StepPlan:
    """Plan and run one step at depth 0; → its plan."""
    step = world.scheduler.schedule()
    assert step is not None
    plan = step.plan()
    world._take(world.scheduler.complete(step, world.runner.launch(plan).result()))
    return plan


def starts(world: World, most: int = 1000) -> list[Sequence]:
    """Run to the end; → sequences in the order of their start."""
    order: list[Sequence] = []
    world.scheduler.on_start = order.append
    world.run(most)
    return order


# --- the budget -------------------------------------------------------------------------------------------------------


def test_chunks_end_on_block_borders_unless_last() -> None:
    world = World(chunk=10)
    world.add(prompt_of(1, 27), params(1))
    rows = [plan_of(world).rows[0] for _ in range(4)]
    assert [(row.start, row.count) for row in rows] == [(0, 8), (8, 8), (16, 8), (24, 3)]
    assert [row.sample for row in rows] == [False, False, False, True]


def test_decode_rows_come_first_and_are_counted() -> None:
    world = World(chunk=16)
    for seed in range(5):
        world.add(prompt_of(seed, 4), params(40))
    plan_of(world)
    plan_of(world)
    world.add(prompt_of(9, 40), params(2))
    plan = plan_of(world)
    assert [row.ids is None for row in plan.rows] == [True] * 5 + [False]
    assert plan.rows[-1].count == 8, "11 tokens are left, in whole blocks"
    assert plan.tokens == 13


def test_a_step_has_room_for_one_block_however_many_decode() -> None:
    world = World(chunk=4, max_running=8)
    for seed in range(7):
        world.add(prompt_of(seed, 4), params(30))
    for _ in range(10):
        world.turn()
    late = world.add(prompt_of(9, 12), params(2))
    world.run()
    assert world.ends[late.sid].reason == "length"
    assert world.runner.largest <= 7 + 4


def test_a_long_prompt_leaves_half_of_the_budget_to_short_ones() -> None:
    world = World(chunk=16, num_blocks=200)
    long = world.add(prompt_of(1, 320), params(1))
    plan_of(world)
    short = world.add(prompt_of(2, 6), params(1))
    assert [(row.slot, row.count) for row in plan_of(world).rows] == [(long.slot, 8), (1, 6)]
    assert short.sid in world.ends, "the short one waited for the long one"


def test_the_shortest_of_the_others_comes_first() -> None:
    world = World(chunk=16, num_blocks=200)
    long = world.add(prompt_of(1, 320), params(1))
    middle = world.add(prompt_of(2, 100), params(1))
    short = world.add(prompt_of(3, 5), params(1))
    rows = plan_of(world).rows
    assert [(row.slot, row.count) for row in rows] == [(0, 8), (2, 5)], "3 tokens are left: no whole block"
    assert short.sid in world.ends
    assert long.planned == 8 and middle.planned == 0


def test_short_prompts_do_not_stop_a_long_one() -> None:
    """However many short ones arrive, the long one gets half of each step."""
    world = World(chunk=16, num_blocks=400, max_running=40)
    long = world.add(prompt_of(1, 160), params(1))
    for turn in range(30):
        for number in range(3):
            world.add(prompt_of(1000 + 3 * turn + number, 12), params(1))
        world.turn()
        if long.sid in world.ends:
            break
    assert turn <= 20


def test_one_block_a_step_goes_round() -> None:
    world = World(chunk=4, num_blocks=400, max_running=40)
    long = world.add(prompt_of(1, 40), params(1))
    for turn in range(40):
        world.add(prompt_of(1000 + turn, 4), params(1))
        world.turn()
    assert long.sid in world.ends
    assert len(world.ends) >= 18


# --- admission --------------------------------------------------------------------------------------------------------


def large_behind_a_holder(bypass: int) -> tuple[World, Sequence, Sequence]:
    """A pool of 20 blocks: one sequence holds 8, one that needs all 20 waits."""
    world = World(num_blocks=20, max_bypass=bypass, max_running=30)
    holder = world.add(prompt_of(1, 24), params(8))
    world.turn()
    large = world.add(prompt_of(2, 76), params(4))
    return world, holder, large


def test_45_small_ones_that_fit_start_at_once() -> None:
    world, _, large = large_behind_a_holder(32)
    small = world.add(prompt_of(3, 4), params(2))
    world.turn()
    assert small.usage is not None and large.usage is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("bypass", [0, 1, 5, 32])
def test_45_a_large_one_is_passed_by_at_most_so_many(bypass: int, depth: int) -> None:
    world, _, large = large_behind_a_holder(bypass)
    world.depth = depth
    before: list[Sequence] = []
    world.scheduler.on_start = before.append
    for seed in range(200):  # a stream of small ones that never ends by itself
        world.add(prompt_of(100 + seed, 3), params(2))
        world.turn()
    assert large in before, "it never started"
    assert before.index(large) == bypass
    assert world.ends[large.sid].reason == "length"
    world.run()


def test_45_two_large_ones_start_in_their_order() -> None:
    world, _, large = large_behind_a_holder(3)
    second = world.add(prompt_of(7, 76), params(4))
    for seed in range(20):
        world.add(prompt_of(100 + seed, 3), params(2))
    order = starts(world)
    assert order.index(large) < order.index(second)
    assert order.index(large) <= 3


def test_places_go_in_order_of_arrival() -> None:
    world = World(max_running=2)
    sequences = [world.add(prompt_of(seed, 4), params(3)) for seed in range(7)]
    assert starts(world) == sequences


def test_44_what_can_never_fit_is_known() -> None:
    world = World(num_blocks=8)
    assert world.scheduler.fits(32)
    assert not world.scheduler.fits(33)
    whole = world.add(prompt_of(1, 20), params(12))
    world.run()
    assert world.ends[whole.sid].reason == "length"


def test_62_the_whole_pool_is_there_again_when_idle() -> None:
    world = World(num_blocks=8)
    for seed in range(6):
        world.add(prompt_of(seed, 9), params(7))
    world.run()
    whole = world.add(prompt_of(9, 31), params(1))
    world.run()
    assert world.ends[whole.sid].reason == "length"


@pytest.mark.parametrize("depth", DEPTHS)
def test_preemption_takes_the_youngest_and_order_stays(depth: int) -> None:
    world = World(num_blocks=14, depth=depth)
    sequences = [world.add(prompt_of(seed, 6), params(24)) for seed in range(3)]
    world.run()
    assert world.scheduler.counters.preemptions > 0
    assert list(world.ends) == [sequence.sid for sequence in sequences]


def test_nobody_is_started_only_to_be_preempted() -> None:
    """The last block is kept for the one that will need it next."""
    world = World(num_blocks=4)
    first = world.add(prompt_of(1, 11), params(5))
    world.turn()
    second = world.add(prompt_of(2, 3), params(6))
    world.run()
    assert world.scheduler.counters.preemptions == 0
    assert world.ids[first.sid] == expected(prompt_of(1, 11), 5)
    assert world.ids[second.sid] == expected(prompt_of(2, 3), 6)


def test_a_blocked_queue_is_not_searched_again_without_need() -> None:
    world, holder, large = large_behind_a_holder(32)
    looks: list[Sequence] = []
    find = world.prefix.find

    def counting(sequence: Sequence) -> Hit:
        looks.append(sequence)
        return find(sequence)

    world.prefix.find = counting  # type: ignore[method-assign]  # the test looks over its shoulder
    for _ in range(4):
        world.turn()
    assert holder.slot >= 0 and looks == [large]
    world.run()
    assert world.ends[large.sid].reason == "length"
