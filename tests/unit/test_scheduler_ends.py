"""One end for each sequence, whatever brings it.

51: non-finite logits end one sequence, whose blocks are not used again. 50: an error in admitting one is its own.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine_proc.scheduler import StepFault
from engine_proc.sequence import ENDS, MOVES, IllegalMove, State
from tests.unit.engine_world import EOS, VOCABULARY, World, expected, mix, params, prompt_of
from wire.messages import Params

DEPTHS = [0, 1]


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
