"""Who runs when: budget, order, bounded bypass, room in the pool; one end for each sequence.

45: a large sequence is passed by at most max_bypass others. 44: what can never fit is refused. 57: all but
keep_tokens of a prompt may be reused, in whole blocks. 51: non-finite logits end one sequence, whose blocks are not
used again. 50: an error in admitting one sequence is its own.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine_proc.plan import StepPlan
from engine_proc.prefix import Hit
from engine_proc.scheduler import StepFault
from engine_proc.sequence import ENDS, MOVES, IllegalMove, Sequence, State
from tests.unit.engine_world import EOS, VOCABULARY, World, expected, mix, params, prompt_of
from wire.messages import Params

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


# --- the prefix cache -------------------------------------------------------------------------------------------------


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


# --- ends -------------------------------------------------------------------------------------------------------------


def scripted(ids: list[int]) -> tuple[World, list[int]]:
    """A model that says `ids` after a prompt, whatever it is."""
    prompt = [7, 8, 9]
    script: dict[int, int] = {}
    digest = together = 0
    for token in prompt:
        digest = mix(digest, token)
        together ^= digest
    for token in ids:
        script[together] = token
        digest = mix(digest, token)
        together ^= digest
    return World(next_id=lambda digest: script.get(digest, 5)), prompt


@pytest.mark.parametrize(
    ("wish", "count", "reason", "stop_id"),
    [
        (params(20), 5, "stop", EOS),
        (params(20, ignore_eos=True), 20, "length", -1),
        (params(20, stop_token_ids=[13]), 4, "stop", 13),
        (params(20, stop_token_ids=[13], ignore_eos=True), 4, "stop", 13),
        (params(5), 5, "stop", EOS),
        (params(3), 3, "length", -1),
        (params(1), 1, "length", -1),
    ],
)
@pytest.mark.parametrize("depth", DEPTHS)
def test_how_a_sequence_ends(wish: Params, count: int, reason: str, stop_id: int, depth: int) -> None:
    world, prompt = scripted([10, 11, 12, 13, EOS, 15])
    world.depth = depth
    sequence = world.add(prompt, wish)
    world.run()
    end = world.ends[sequence.sid]
    assert (end.reason, end.completion_tokens, end.stop_id, end.code) == (reason, count, stop_id, "")
    assert world.ids[sequence.sid][:5] == [10, 11, 12, 13, EOS][:count]


def test_what_a_runner_must_ban() -> None:
    world = World()
    sequence = world.add([5, 6, 7], params(9, ignore_eos=True, stop_token_ids=[13], min_tokens=4))
    state = sequence.slot_state()
    assert (state.banned_ids, state.stop_ids, state.min_position) == ([EOS], [13], 7)
    sequence = world.add([5, 6, 7], params(9, stop_token_ids=[13], min_tokens=4))
    state = sequence.slot_state()
    assert (state.banned_ids, state.stop_ids, state.min_position) == ([], [EOS, 13], 7)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("turns", range(12))
def test_an_abort_is_idempotent_and_ends_any_state(depth: int, turns: int) -> None:
    world = World(depth=depth, chunk=8, max_running=2)
    others = [world.add(prompt_of(seed, 9), params(6)) for seed in range(2)]
    sequence = world.add(prompt_of(9, 21), params(6))
    for _ in range(turns):
        world.turn()
    live = sequence.sid in world.scheduler.sequences
    assert world.scheduler.abort(sequence.sid) == live
    assert not world.scheduler.abort(sequence.sid)
    assert not world.scheduler.abort(12345)
    world.run()
    assert world.ends[sequence.sid].reason == ("abort" if live else "length")
    for seed, other in enumerate(others):
        assert world.ids[other.sid] == expected(prompt_of(seed, 9), 6)


@pytest.mark.parametrize("depth", DEPTHS)
def test_51_a_non_finite_row_ends_its_sequence_only(depth: int) -> None:
    world = World(depth=depth)
    prompt, other = prompt_of(1, 12), prompt_of(2, 12)
    world.add(prompt[:9], params(1))
    world.run()  # two blocks of it are cached
    bad = world.add(prompt, params(20, hooks={"nan_step": 7}))
    good = world.add(other, params(20))
    world.run()
    end = world.ends[bad.sid]
    assert (end.reason, end.code, end.completion_tokens) == ("error", "internal_error", 6)
    assert world.ids[bad.sid] == expected(prompt, 6)
    assert bad.state is State.FAILED
    assert world.ids[good.sid] == expected(other, 20)
    world.prefix.complete_keys(bad, 4)
    assert [world.pool.holds(key) for key in bad.keys] == [-1] * 4, "a block of it can still be found"
    again = world.add(prompt, params(20))
    world.run()
    assert world.ids[again.sid] == expected(prompt, 20)
    assert world.ends[again.sid].usage.cached_tokens == 0


def test_51_a_row_that_is_not_finite_after_a_preemption() -> None:
    world = World(depth=1)
    bad = world.add(prompt_of(1, 12), params(20, hooks={"nan_step": 5}))
    while len(bad.produced) < 4:
        world.turn()
    world.scheduler._preempt(bad)
    world.run()
    assert world.ends[bad.sid].code == "internal_error"
    assert world.pool.counts().cached == 0


def test_50_an_error_in_admission_is_that_sequences_own() -> None:
    world = World()
    sequences = [world.add(prompt_of(seed, 9), params(6)) for seed in range(3)]
    world.runner.fail_open = True
    world.run()
    assert [world.ends[sequence.sid].code for sequence in sequences] == ["internal_error", "", ""]
    for seed in (1, 2):
        assert world.ids[sequences[seed].sid] == expected(prompt_of(seed, 9), 6)


def test_50_a_fault_inside_a_step_is_not_caught() -> None:
    world = World()
    world.add(prompt_of(1, 9), params(6, hooks={"fail_step": 3}))
    world.turn()
    world.turn()
    with pytest.raises(StepFault):
        world.turn()


def test_dropping_all_leaves_nothing_and_says_nothing() -> None:
    world = World(depth=1, max_running=2)
    for seed in range(5):
        world.add(prompt_of(seed, 9), params(6))
    for _ in range(4):
        world.turn()
    said = len(world.ends)
    world.scheduler.drop_all()
    assert world.scheduler.take_finished() == []
    world.run()
    assert len(world.ends) == said


@pytest.mark.parametrize("depth", DEPTHS)
def test_logprobs_belong_to_their_ids(depth: int) -> None:
    world = World(depth=depth, num_blocks=24)
    wanted = [world.add(prompt_of(seed, 9), params(30, logprobs=seed - 1)) for seed in range(3)]
    world.run()
    assert world.scheduler.counters.preemptions > 0
    records = [item for output in world.outputs for item in output.logprobs]
    assert {item.sid for item in records} == {sequence.sid for sequence in wanted[1:]}
    for sequence in wanted[1:]:
        mine = [item for item in records if item.sid == sequence.sid]
        found = {item.offset + at: record for item in mine for at, record in enumerate(item.tokens)}
        assert sorted(found) == list(range(30))
        assert [-round(1000 * found[at].logprob) for at in range(30)] == world.ids[sequence.sid]
        assert [record.top_ids for record in sequence.records] == [[token] for token in world.ids[sequence.sid]]


# --- states -----------------------------------------------------------------------------------------------------------


def test_the_table_of_moves() -> None:
    assert set(MOVES) == set(State)
    for state, moves in MOVES.items():
        is_end = state in {State.FINISHED, State.ABORTED, State.FAILED}
        assert is_end == (not moves)
        assert is_end or moves >= ENDS, "every live sequence can be aborted and can fail"


@pytest.mark.parametrize("end", [State.FINISHED, State.ABORTED, State.FAILED])
def test_nothing_follows_an_end(end: State) -> None:
    sequence = World().sequence([5, 6, 7])
    sequence.move(end)
    assert sequence.ended
    for state in State:
        with pytest.raises(IllegalMove):
            sequence.move(state)


def test_ids_of_any_part() -> None:
    sequence = World().sequence(list(range(10, 20)), produced=list(range(20, 27)))
    assert sequence.known == 17
    for start in range(17):
        for end in range(start + 1, 18):
            wanted = np.arange(10 + start, 10 + end, dtype=np.int32)
            assert np.array_equal(sequence.ids(start, end), wanted)
            assert sequence.raw(start, end) == wanted.tobytes()
    assert max(expected([1], 5)) < VOCABULARY
