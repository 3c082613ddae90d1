"""The law: every member of the llama family computes what transformers computes.

In fp32 on the CPU the teacher-forced logits differ by at most 1e-3 at every position, and greedy ids are equal by the
identity rule, whether a sequence runs alone or in a batch, in chunks of any size, or behind a cached prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_proc.loader import load
from engine_proc.runner import Runner
from tests.identity import Identity
from tests.model import driver_logits
from tests.model.checkpoints import MEMBERS, VOCAB, make_checkpoint
from tests.model.driver import Driver, params, state
from tests.model.driver_logits import Forced

BLOCK = 16
NEW = 24
LENGTHS = (203, 1, 17, 450, 2, 16, 64, 15)


@dataclass
class Pair:
    """A checkpoint in the engine and in transformers, with what transformers produces."""

    folder: Path
    runner: Runner
    prompts: list[list[int]]
    ids: list[list[int]]  # greedy, NEW each
    logits: list[torch.Tensor]  # of prompt + ids, all positions

    def check_greedy(self, produced: list[list[int]]) -> None:
        identity = Identity()
        for prompt, expected, actual, logits in zip(self.prompts, self.ids, produced, self.logits, strict=True):
            first = len(prompt) - 1
            identity.same(expected, actual, lambda i, x=logits, f=first: x[f + i].numpy(), f"prompt of {len(prompt)}")  # type: ignore[misc]
        identity.at_most(0)

    def check_logits(self, found: list[torch.Tensor], from_position: int = 0) -> None:
        for expected, actual in zip(self.logits, found, strict=True):
            assert (expected[from_position : from_position + len(actual)] - actual).abs().max() < 1e-3


@pytest.fixture(scope="module", params=MEMBERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder, request.param)
    generator = np.random.default_rng(5)
    prompts = [generator.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    ids, logits = [], []
    with torch.no_grad():
        for prompt in prompts:
            given = torch.tensor([prompt])
            whole = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            ids.append(whole[0, len(prompt) :].tolist())
            logits.append(model(whole).logits[0])
    loaded = load(folder, "cpu", "fp32", "safetensors", lambda done, total: None, BLOCK)
    return Pair(folder, Runner(loaded, 160, len(LENGTHS)), prompts, ids, logits)


@pytest.mark.parametrize("chunk", [1000, 16, 100])
def test_teacher_forced_logits_match_in_one_batch(pair: Pair, chunk: int) -> None:
    driver = Driver(pair.runner, shuffle_seed=chunk)
    sequences = [
        Forced(driver, prompt + ids, len(prompt), chunk) for prompt, ids in zip(pair.prompts, pair.ids, strict=True)
    ]
    pair.check_logits(driver_logits.run(driver, sequences))


def test_teacher_forced_logits_match_alone(pair: Pair) -> None:
    found = []
    for prompt, ids in zip(pair.prompts, pair.ids, strict=True):
        driver = Driver(pair.runner)
        found += driver_logits.run(driver, [Forced(driver, prompt + ids, len(prompt), 1000)])
    pair.check_logits(found)


def test_greedy_ids_match_in_one_batch(pair: Pair) -> None:
    driver = Driver(pair.runner, shuffle_seed=3)
    sequences = [driver.start(state(prompt), NEW) for prompt in pair.prompts]
    driver.run(sequences, NEW, chunk=48)
    driver.stop(sequences)
    pair.check_greedy([sequence.ids for sequence in sequences])


@pytest.mark.parametrize("chunk", [1000, 32])
def test_greedy_ids_match_alone(pair: Pair, chunk: int) -> None:
    produced = []
    for prompt in pair.prompts:
        driver = Driver(pair.runner)
        sequence = driver.start(state(prompt), NEW)
        driver.run([sequence], NEW, chunk)
        driver.stop([sequence])
        produced.append(sequence.ids)
    pair.check_greedy(produced)


def test_greedy_ids_match_behind_a_cached_prefix(pair: Pair) -> None:
    """The blocks of a finished sequence serve as prefix of the next ones, several of them at once."""
    driver = Driver(pair.runner, shuffle_seed=4)
    index = LENGTHS.index(max(LENGTHS))
    prompt = pair.prompts[index]
    first = driver.start(state(prompt), NEW)
    driver.run([first], NEW)
    prefixes = (1, 7, len(prompt) // BLOCK)
    sequences = [driver.start(state(prompt), NEW, first.blocks[:count].tolist(), count * BLOCK) for count in prefixes]
    driver.run(sequences, NEW)
    for sequence in (first, *sequences):
        pair.runner.close_slot(sequence.slot)
    identity = Identity()
    for sequence in sequences:
        identity.same(pair.ids[index], sequence.ids, lambda i: pair.logits[index][len(prompt) - 1 + i].numpy())
    identity.at_most(0)


def test_ids_match_when_rebuilt_from_produced_ids(pair: Pair) -> None:
    """A sequence that is rebuilt in two parts (prompt, then produced ids) goes on as if undisturbed."""
    driver = Driver(pair.runner, shuffle_seed=6)
    produced = []
    for prompt, ids in zip(pair.prompts, pair.ids, strict=True):
        sequence = driver.start(state(prompt, produced=ids[:10]), NEW)
        driver.run([sequence], NEW - 10)
        driver.stop([sequence])
        produced.append(ids[:10] + sequence.ids)
    pair.check_greedy(produced)


def test_deterministic_steps_give_a_batch_the_bits_of_solo_runs(pair: Pair) -> None:
    wish = params(logprobs=3)
    driver = Driver(pair.runner, shuffle_seed=7)
    together = [driver.start(state(prompt, wish), NEW) for prompt in pair.prompts]
    driver.run(together, NEW, deterministic=True)
    driver.stop(together)
    for prompt, sequence in zip(pair.prompts, together, strict=True):
        alone = driver.start(state(prompt, wish), NEW)
        driver.run([alone], NEW)
        driver.stop([alone])
        assert alone.ids == sequence.ids
        assert alone.logprobs == sequence.logprobs
