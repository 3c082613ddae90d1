"""The law: batch invariance. A request's ids are the same alone and among any others, by the identity rule (fp32, CPU).

200 random requests (20 in the normal run), greedy and seeded, with penalties, filters, biases and stop ids, each alone
and then all together in one batch through scheduler and runner. Differences of fp32 sums are about 1e-5 and ties are
closer than 1e-3, so ties are rare: at most one in 100 requests, none among 20. What a tie is measured on is what the
sampler takes the best of: logits after biases and penalties, and where an id is drawn, after temperature, filters and
noise. Log-probabilities differ by less than 1e-3.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine_proc.loader import LoadedModel, load
from engine_proc.sampler import Sampled, SamplePlan, Sampler
from engine_proc.sequence import Sequence
from tests.identity import Identity, first_difference
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.test_engine_exact import BLOCK, Engine
from tests.unit.engine_world import params
from wire.messages import Params

LONGEST, MOST_NEW = 400, 64
BLOCKS_EACH = -(-(LONGEST + MOST_NEW) // BLOCK)
LOGPROB_GAP = 1e-3
COUNTS = [20, pytest.param(200, marks=pytest.mark.long)]

Job = tuple[list[int], Params, int]


class Watched(Sampler):
    """A sampler that keeps the scores of its last step, of which it took the best."""

    scores: torch.Tensor

    def sample(self, logits: torch.Tensor, plan: SamplePlan, best: Sampled | None = None) -> Sampled:
        self.scores = logits  # edited in place
        return super().sample(logits, plan, best)

    def _draw(self, z: torch.Tensor, plan: SamplePlan, drawn: torch.Tensor) -> torch.Tensor:
        self.scores = z  # filtered and with noise, in place
        return super()._draw(z, plan, drawn)


def random_wish(source: random.Random, number: int) -> Params:
    """Half of them greedy; each further wish in about a third of them."""
    wish = params(source.randint(1, MOST_NEW), seed=source.getrandbits(40))
    if number % 2:
        wish.temperature = source.uniform(0.5, 1.3)
        if source.random() < 0.35:
            wish.top_p = source.uniform(0.5, 0.95)
        if source.random() < 0.35:
            wish.top_k = source.randint(2, 80)
        if source.random() < 0.2:
            wish.min_p = source.uniform(0.01, 0.1)
    if source.random() < 0.35:
        wish.repetition_penalty = source.uniform(0.8, 1.5)
    if source.random() < 0.35:
        wish.frequency_penalty = source.uniform(-0.5, 1.0)
        wish.presence_penalty = source.uniform(-0.5, 1.0)
    if source.random() < 0.35:
        wish.logit_bias = {source.randrange(VOCAB): source.uniform(-8, 8) for _ in range(source.randint(1, 40))}
    if source.random() < 0.2:
        wish.stop_token_ids = source.sample(range(VOCAB), 3)
        wish.min_tokens = source.randint(0, wish.max_tokens)
    if source.random() < 0.35:
        wish.logprobs = source.randint(0, 5)
    return wish


def random_jobs(count: int) -> list[Job]:
    """Prompt, wish and choice of each request. Some prompts are short, some are as long as a few chunks."""
    source = random.Random(count)
    jobs = []
    for number in range(count):
        length = source.choice((1, source.randint(1, 40), source.randint(1, LONGEST), LONGEST))
        prompt = [source.randrange(VOCAB) for _ in range(length)]
        jobs.append((prompt, random_wish(source, number), source.randrange(8)))
    return jobs


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["qwen3", "llama_biased"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("invariance")
    make_checkpoint(folder, request.param)
    return load(folder, "cpu", "fp32", "safetensors", lambda done, total: None, BLOCK)


def scores_at(loaded: LoadedModel, job: Job, ids: list[int], index: int) -> npt.NDArray[np.float32]:
    """The scores [V] behind produced id `index` of the request alone, its ids before that one forced."""
    prompt, wish, choice = job
    engine = Engine(loaded, BLOCKS_EACH, 0)
    watched = Watched(engine.runner._table)
    engine.runner._sampler = watched
    sequence = engine.add(prompt, wish, ids[:index], choice)
    while len(sequence.produced) <= index:
        engine.turn()
    scores: npt.NDArray[np.float32] = watched.scores[0].numpy().copy()
    return scores


def run_alone(loaded: LoadedModel, jobs: list[Job]) -> tuple[Engine, list[Sequence]]:
    """One after the other, nothing cached."""
    engine, found = Engine(loaded, BLOCKS_EACH, 0, chunk=512), []
    for prompt, wish, choice in jobs:
        found.append(engine.add(prompt, wish, choice=choice))
        engine.run()
        engine.scheduler.pool.flush()
    assert engine.scheduler.counters.most_rows == 1
    return engine, found


def run_together(loaded: LoadedModel, jobs: list[Job], depth: int) -> tuple[Engine, list[Sequence]]:
    """All there at once, with a slot for each."""
    engine = Engine(loaded, BLOCKS_EACH * len(jobs), depth, chunk=256, max_running=len(jobs))
    found = [engine.add(prompt, wish, choice=choice) for prompt, wish, choice in jobs]
    engine.run()
    assert engine.scheduler.counters.most_rows > len(jobs) // 4, "they hardly met"
    assert engine.scheduler.counters.preemptions == 0
    return engine, found


@pytest.mark.parametrize("count", COUNTS)
def test_alone_and_together_are_the_same(loaded: LoadedModel, count: int) -> None:
    jobs = random_jobs(count)
    alone, singles = run_alone(loaded, jobs)
    assert len({tuple(alone.ids[single.sid][:8]) for single in singles if single.params.max_tokens >= 8}) > count // 2
    for depth in (0, 1):
        identity = Identity("fp32")
        crowd, members = run_together(loaded, jobs, depth)
        for number, (job, single, member) in enumerate(zip(jobs, singles, members, strict=True)):
            expected, actual = alone.ids[single.sid], crowd.ids[member.sid]

            def logits_at(index: int, job: Job = job, ids: list[int] = expected) -> npt.NDArray[np.float32]:
                return scores_at(loaded, job, ids, index)

            identity.same(expected, actual, logits_at, f"request {number}")
            same = first_difference(expected, actual)
            check_logprobs(single, member, same)
            if same < 0:
                assert alone.ends[single.sid].reason == crowd.ends[member.sid].reason
        identity.at_most(count // 100)


def check_logprobs(single: Sequence, member: Sequence, same: int) -> None:
    """Of all ids up to the first that differs (-1: all)."""
    wanted = single.params.logprobs >= 0
    assert len(single.records) == (len(single.produced) if wanted else 0)
    pairs = zip(single.records, member.records, strict=same < 0)
    for index, (left, right) in enumerate(pairs):
        if index == same:
            break
        assert abs(left.logprob - right.logprob) < LOGPROB_GAP
        gaps = np.abs(np.subtract(left.top_logprobs, right.top_logprobs))
        assert gaps.max(initial=0.0) < LOGPROB_GAP


def test_the_scores_of_a_tie_are_those_that_decide(loaded: LoadedModel) -> None:
    """The rule's reference is right: at every id the best score is the id that was produced."""
    jobs = random_jobs(20)
    alone, singles = run_alone(loaded, jobs)
    for job, single in zip(jobs, singles, strict=True):
        ids = alone.ids[single.sid]
        index = len(ids) // 2
        assert int(scores_at(loaded, job, ids, index).argmax()) == ids[index]
