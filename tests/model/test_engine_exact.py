"""The law: whatever preempts, shares, resumes or runs beside a real sequence, its ids are those of its solo run.

52: four greedy and four seeded sequences of 300 tokens in a pool for fewer, preempted before the first token, in
mid-output and twice in a row. 54, 57: with cached prefixes. Also one step ahead, as on a device, and through the
resume interface at random ids. On a CUDA device the same with its own runner.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine_proc.blocks import BlockPool
from engine_proc.loader import LoadedModel, load
from engine_proc.prefix import PrefixCache, PrefixRules
from engine_proc.runner import PendingStep, Runner
from engine_proc.scheduler import Limits, Output, Scheduler, Step
from engine_proc.sequence import Sequence
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.unit.engine_world import params
from wire.messages import Finished, Params

BLOCK, NEW, SLOTS = 16, 300, 8
GREEDY = [params(NEW) for _ in range(4)]
SEEDED = [
    params(NEW, temperature=0.9, seed=1),
    params(NEW, temperature=1.1, seed=2, top_p=0.9, logprobs=2),
    params(NEW, temperature=0.8, seed=3, top_k=40, repetition_penalty=1.2),
    params(NEW, temperature=1.0, seed=4, frequency_penalty=0.3, presence_penalty=0.2),
]
WISHES = GREEDY + SEEDED
LENGTHS = (5, 16, 33, 70, 1, 31, 64, 40)


def prompts() -> list[list[int]]:
    source = random.Random(52)
    return [[source.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


class Engine:
    """Scheduler and runner with a loop of `depth` steps ahead, without links."""

    def __init__(
        self, loaded: LoadedModel, num_blocks: int, depth: int, chunk: int = 64, max_running: int = SLOTS
    ) -> None:
        self.runner = Runner(loaded, num_blocks, max_running)
        pool = BlockPool(num_blocks, BLOCK)
        prefix = PrefixCache(pool, loaded.model.cache_spec, PrefixRules(b"s", loaded.digest))
        self.scheduler = Scheduler(pool, prefix, self.runner, Limits(max_running, chunk, 32))
        self.pending: deque[tuple[Step, PendingStep]] = deque()
        self.depth, self.sid = depth, 0
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, Finished] = {}

    def add(self, prompt: list[int], wish: Params, produced: list[int] | None = None, choice: int = 0) -> Sequence:
        self.sid += 1
        raw, done = (np.array(ids, np.int32).tobytes() for ids in (prompt, produced or []))
        sequence = Sequence(self.sid << 8 | choice, 0, "", wish, raw, [], done, [], BLOCK, 0.0)
        self.ids[sequence.sid] = list(produced or [])
        self.scheduler.submit(sequence)
        return sequence

    def turn(self) -> None:
        step = self.scheduler.schedule()
        if step is not None:
            self.pending.append((step, self.runner.launch(step.plan())))
        while self.pending and (step is None or len(self.pending) > self.depth):
            done, pending = self.pending.popleft()
            self.take(self.scheduler.complete(done, pending.result()))
        self.scheduler.check()

    def take(self, output: Output) -> None:
        ids = np.frombuffer(output.ids, np.int32).tolist()
        for sequence, count in zip(output.sequences, output.counts, strict=True):
            self.ids[sequence.sid] += ids[:count]
            ids = ids[count:]
        self.ends.update({finished.sid: finished for finished in output.finished})

    def run(self) -> None:
        while self.scheduler.sequences or self.pending:
            self.turn()
        counts = self.scheduler.pool.counts()
        assert counts.pinned == 0 and counts.free + counts.cached == counts.total


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("exact")
    make_checkpoint(folder, "qwen3")
    return load(folder, request.param, "fp32", "safetensors", lambda done, total: None, BLOCK)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def solo(loaded: LoadedModel) -> list[list[int]]:
    """Each sequence alone, with nothing cached."""
    found = []
    for prompt, wish in zip(prompts(), WISHES, strict=True):
        engine = Engine(loaded, 64, 0)
        sequence = engine.add(prompt, wish)
        engine.run()
        assert engine.ends[sequence.sid].reason == "length"
        found.append(engine.ids[sequence.sid])
    assert len({tuple(ids) for ids in found}) == len(found)
    assert all(len(set(ids)) > 20 for ids in found[4:]), "the seeded ones say too little"
    return found


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("half", ["greedy", "seeded"])
def test_52_preempted_sequences_equal_their_solo_runs(
    loaded: LoadedModel, solo: list[list[int]], depth: int, half: str
) -> None:
    first = 0 if half == "greedy" else 4
    engine = Engine(loaded, 40, depth)
    sequences = [engine.add(prompts()[number], WISHES[number]) for number in range(first, first + 4)]
    engine.turn()
    youngest = max(engine.scheduler._prefilling + engine.scheduler._decoding, key=lambda item: item.order)
    assert not youngest.produced
    engine.scheduler._preempt(youngest)  # before its first token
    while len(sequences[0].produced) < 40:
        engine.turn()
    for _ in range(2):  # in mid-output, twice in a row
        while sequences[0].slot < 0:
            engine.turn()
        engine.scheduler._preempt(sequences[0])
    engine.run()
    assert engine.scheduler.counters.preemptions >= 5, "the pool was not too small"
    assert [engine.ids[sequence.sid] for sequence in sequences] == solo[first : first + 4]


@pytest.mark.parametrize("depth", [0, 1])
def test_52_resumed_at_random_ids(loaded: LoadedModel, solo: list[list[int]], depth: int) -> None:
    source = random.Random(depth)
    engine = Engine(loaded, 200, depth)
    sequences = [
        engine.add(prompt, wish, ids[: source.randrange(NEW)])
        for prompt, wish, ids in zip(prompts(), WISHES, solo, strict=True)
    ]
    engine.run()
    assert [engine.ids[sequence.sid] for sequence in sequences] == solo


@pytest.mark.parametrize("depth", [0, 1])
def test_54_cached_prefixes_change_nothing(loaded: LoadedModel, solo: list[list[int]], depth: int) -> None:
    engine = Engine(loaded, 200, depth)
    cached = []
    for _ in range(2):
        sequences = [engine.add(prompt, wish) for prompt, wish in zip(prompts(), WISHES, strict=True)]
        engine.run()
        assert [engine.ids[sequence.sid] for sequence in sequences] == solo
        cached = [engine.ends[sequence.sid].usage.cached_tokens for sequence in sequences]
    assert cached == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]


def test_54_a_conversation_goes_on_from_its_own_blocks(loaded: LoadedModel, solo: list[list[int]]) -> None:
    engine = Engine(loaded, 200, 0)
    engine.add(prompts()[0], WISHES[0])
    engine.run()
    longer = prompts()[0] + solo[0] + prompts()[2]
    found = []
    for wish in (params(20), params(20, prefix_cache=False)):
        sequence = engine.add(longer, wish)
        engine.run()
        found.append((engine.ids[sequence.sid], engine.ends[sequence.sid].usage.cached_tokens))
    assert found[0][0] == found[1][0]
    assert [tokens for _, tokens in found] == [(LENGTHS[0] + NEW - 1) // BLOCK * BLOCK, 0]


def test_a_long_random_crowd_equals_solo_runs(loaded: LoadedModel) -> None:
    """60 requests with shared prefixes in a small pool, one step ahead."""
    source = random.Random(9)
    shared = [source.randrange(VOCAB) for _ in range(100)]
    jobs = []
    for number in range(60):
        prompt = shared[: source.randrange(100)] + [source.randrange(VOCAB) for _ in range(source.randint(1, 40))]
        wish = params(source.randint(1, 24), temperature=source.choice([0.0, 1.0]), seed=number)
        jobs.append((prompt, wish, number % 3))
    crowd = Engine(loaded, 30, 1, chunk=48)
    sequences = [crowd.add(prompt, wish, choice=choice) for prompt, wish, choice in jobs]
    crowd.run()
    alone = Engine(loaded, 64, 0)
    for (prompt, wish, choice), sequence in zip(jobs, sequences, strict=True):
        wish.prefix_cache = False
        single = alone.add(prompt, wish, choice=choice)
        alone.run()
        assert crowd.ids[sequence.sid] == alone.ids[single.sid]
