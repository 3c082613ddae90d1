"""The law: a step's result lists its sampled rows in the plan's order, and no row depends on the others beside it."""

from __future__ import annotations

import numpy as np
import pytest

from engine_proc.loader import load
from engine_proc.plan import Row, StepPlan
from engine_proc.runner import Runner
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.driver import Driver, params, state

LENGTHS = (70, 3, 150, 16, 33)
NEW = 12
WISHES = (
    params(temperature=0.9, seed=1),
    params(temperature=1.1, seed=2, top_p=0.8, logprobs=2),
    params(),
    params(temperature=0.7, seed=4, top_k=9, repetition_penalty=1.3),
    params(frequency_penalty=0.6, logprobs=0),
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("steps")
    make_checkpoint(folder, "qwen2")
    return Runner(load(folder, "cpu", "fp32", "safetensors", lambda done, total: None, 16), 64, 8)


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(31)
    return [generator.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def alone(runner: Runner) -> list[list[int]]:
    found = []
    for prompt, wish in zip(prompts(), WISHES, strict=True):
        driver = Driver(runner)
        sequence = driver.start(state(prompt, wish), NEW)
        driver.run([sequence], NEW)
        driver.stop([sequence])
        found.append(sequence.ids)
    return found


def test_seeded_and_penalised_sequences_are_the_same_in_a_batch_and_when_rebuilt(runner: Runner) -> None:
    expected = alone(runner)
    driver = Driver(runner, shuffle_seed=2)
    together = [driver.start(state(p, w), NEW) for p, w in zip(prompts(), WISHES, strict=True)]
    driver.run(together, NEW, chunk=40)
    driver.stop(together)
    assert [sequence.ids for sequence in together] == expected
    assert [len(sequence.logprobs) for sequence in together] == [0, NEW, 0, 0, NEW]
    for at in (1, 5, NEW - 1):
        rebuilt = [
            driver.start(state(p, w, produced=ids[:at]), NEW)
            for p, w, ids in zip(prompts(), WISHES, expected, strict=True)
        ]
        driver.run(rebuilt, NEW - at, chunk=64)
        driver.stop(rebuilt)
        assert [sequence.ids for sequence in rebuilt] == [ids[at:] for ids in expected]


def test_a_poisoned_row_is_flagged_in_its_place_and_disturbs_nobody(runner: Runner) -> None:
    expected = alone(runner)
    driver = Driver(runner, shuffle_seed=3)
    sequences = [driver.start(state(p, w), NEW) for p, w in zip(prompts(), WISHES, strict=True)]
    driver.run(sequences, 4)
    rows = [sequence.row(1) for sequence in sequences]
    rows[1].nan_logits = True
    result = driver.step(rows)
    driver.stop(sequences)
    assert result.finite.tolist() == [True, False, True, True, True]
    assert [int(result.ids[i]) for i in (0, 2, 3, 4)] == [expected[i][4] for i in (0, 2, 3, 4)]
    assert set(result.logprobs) == {4}


def test_steps_without_samples_or_rows_have_empty_results(runner: Runner) -> None:
    driver = Driver(runner)
    sequence = driver.start(state([5] * 40), 1)
    row = sequence.row(16)
    assert not row.sample
    for rows in ([row], []):
        result = runner.launch(StepPlan(rows, sum(r.count for r in rows))).result()
        assert len(result.ids) == 0 and len(result.finite) == 0 and result.logprobs == {}
    driver.stop([sequence])


def test_a_row_of_a_slot_that_is_not_open_is_an_error(runner: Runner) -> None:
    row = Row(7, 0, 1, np.array([1], np.int32), np.array([0], np.int32), True)
    with pytest.raises(RuntimeError, match="slot 7 is not open"):
        runner.launch(StepPlan([row], 1))
