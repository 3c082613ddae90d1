"""The law: draws follow the distribution, and depend on (seed, choice, position, token id) and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine_proc import noise
from engine_proc.sampler import Sampled, Sampler
from engine_proc.slots import SlotTable
from engine_proc.upload import Upload
from tests.model.driver import params, state
from wire.messages import Params

VOCAB = 64
MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1


def make(wishes: Sequence[Params], vocab: int = VOCAB) -> Sampler:
    """A sampler whose slot i runs wishes[i] as choice 0."""
    table = SlotTable(len(wishes), vocab, torch.device("cpu"))
    for slot, wish in enumerate(wishes):
        table.open(slot, state([1, 2], wish))
    return Sampler(table)


def draw(sampler: Sampler, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
    upload = Upload(torch.device("cpu"))
    plan = sampler.plan(np.array(slots), np.array(positions), [], upload)
    upload.send()
    return sampler.sample(logits.clone(), plan)


def chi_square_holds(observed: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> None:
    """Five standard deviations above the statistic's mean are allowed; ids without probability never come."""
    possible = expected > 0
    assert observed[~possible].sum() == 0
    counts = expected[possible] / expected.sum() * observed.sum()
    assert counts.min() > 5
    statistic = float(((observed[possible] - counts) ** 2 / counts).sum())
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), (statistic, freedom)


def softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def frequencies(wish: Params, logits: torch.Tensor, draws: int = 40_000) -> npt.NDArray[np.int64]:
    sampled = draw(make([wish], len(logits)), logits.expand(draws, -1), [0] * draws, range(draws))
    return np.bincount(sampled.ids.numpy(), minlength=len(logits))


def test_draws_follow_the_softmax_at_a_temperature() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 0.6
    for temperature in (0.7, 1.0, 1.9):
        counts = frequencies(params(temperature=temperature, seed=11), logits)
        chi_square_holds(counts, softmax(logits.double().numpy() / temperature))


def test_draws_follow_the_filtered_softmax() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    plain = softmax(logits.double().numpy() / 0.8)
    order = np.argsort(-plain)
    counts = frequencies(params(temperature=0.8, seed=5, top_k=7), logits)
    expected = np.where(np.isin(np.arange(VOCAB), order[:7]), plain, 0.0)
    chi_square_holds(counts, expected)
    counts = frequencies(params(temperature=0.8, seed=5, top_p=0.6), logits)
    size = int((np.cumsum(plain[order]) < 0.6).sum()) + 1
    chi_square_holds(counts, np.where(np.isin(np.arange(VOCAB), order[:size]), plain, 0.0))
    counts = frequencies(params(temperature=0.8, seed=5, min_p=0.3), logits)
    chi_square_holds(counts, np.where(plain >= 0.3 * plain.max(), plain, 0.0))


def test_rare_ids_come_as_often_as_they_should() -> None:
    """16 ids of probability 2^-12 each: the noise is fine enough far out in its tail."""
    weights = np.full(17, 2.0**-12)
    weights[16] = 1 - 16 * 2.0**-12
    counts = frequencies(params(temperature=1.0, seed=3), torch.tensor(np.log(weights), dtype=torch.float32), 200_000)
    chi_square_holds(counts, weights)


def test_seeds_choices_and_positions_draw_independently() -> None:
    draws, small = 40_000, 8
    flat = torch.zeros(draws, small)
    base = make([params(temperature=1.0, seed=77), params(temperature=1.0, seed=78)], small)
    other_choice = SlotTable(1, small, torch.device("cpu"))
    other_choice.open(0, state([1], params(temperature=1.0, seed=77), choice=1))
    reference = draw(base, flat, [0] * draws, range(draws)).ids
    others = [
        draw(base, flat, [1] * draws, range(draws)).ids,
        draw(Sampler(other_choice), flat, [0] * draws, range(draws)).ids,
        draw(base, flat, [0] * draws, range(1, draws + 1)).ids,
    ]
    for other in others:
        joint = np.bincount((reference * small + other).numpy(), minlength=small * small)
        chi_square_holds(joint, np.ones(small * small))


def test_a_row_does_not_depend_on_its_batch_or_slot() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(40, VOCAB, generator=generator)
    wishes = [
        params(
            temperature=(0.0, 0.5, 1.0, 1.3)[i % 4],
            seed=i - 20,
            top_k=(-1, 3, 20)[i % 3],
            top_p=(1.0, 0.9, 0.4, 0.99)[i // 3 % 4],
            min_p=(0.0, 0.05)[i % 2],
            repetition_penalty=(1.0, 1.2)[i // 2 % 2],
        )
        for i in range(40)
    ]
    positions = [100 + 3 * i for i in range(40)]
    together = draw(make(wishes), logits, range(40), positions).ids
    order = torch.randperm(40, generator=generator).tolist()
    moved = draw(make([wishes[i] for i in order]), logits[order], range(40), [positions[i] for i in order]).ids
    assert moved.tolist() == together[order].tolist()
    for i in range(40):
        alone = draw(make([wishes[i]]), logits[i : i + 1], [0], [positions[i]]).ids
        assert int(alone) == int(together[i])


def test_greedy_takes_the_best_id_at_zero_and_tiny_temperatures() -> None:
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(4)) * 30
    for temperature in (0.0, 1e-9, 1e-6):
        sampled = draw(make([params(temperature=temperature, top_p=0.5, top_k=3)]), logits, [0] * 200, range(200))
        assert sampled.ids.equal(logits.argmax(-1)) and bool(sampled.finite.all())
    for temperature in (1.1e-5, 1e-4):  # not greedy by rule, but so sharp that it must agree
        sampled = draw(make([params(temperature=temperature, top_p=0.5, min_p=0.1)]), logits, [0] * 200, range(200))
        assert sampled.ids.equal(logits.argmax(-1))


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def reference_bits(seed: int, choice: int, position: int, token: int) -> int:
    """The generator in unbounded integers."""
    golden = 0x9E3779B97F4A7C15
    sequence = mix64((mix64((seed + golden) & MASK64) + (choice + 1) * golden) & MASK64)
    key = mix64((sequence + (position + 1) * golden) & MASK64)
    x = (token * 0x9E3779B1 + key) & MASK32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK32
    x = (x + (key >> 32)) & MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK32
    return x ^ (x >> 15)


def test_the_generator_is_what_it_says() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    choices, positions = [0, 1, 7, 0, 3, 2], [0, 5, 131071, 17, 4096, 2]
    keys = noise.row_keys(torch.tensor(seeds), torch.tensor(choices), torch.tensor(positions))
    bits = noise.random_bits(keys, noise.token_terms(1000, torch.device("cpu")))
    for row, (seed, choice, position) in enumerate(zip(seeds, choices, positions, strict=True)):
        for token in (0, 1, 2, 500, 999):
            assert int(bits[row, token]) & MASK32 == reference_bits(seed, choice, position, token)


def test_the_generator_does_not_change() -> None:
    """Fixed values: a resumed sequence must go on as another version of the code began it."""
    key = noise.row_keys(torch.tensor([42]), torch.tensor([1]), torch.tensor([1000]))
    bits = noise.random_bits(key, noise.token_terms(4, torch.device("cpu")))
    assert [value & MASK32 for value in bits[0].tolist()] == [0x2C5C3593, 0x4344EC59, 0xE5335894, 0x4EF51C0E]


def test_every_bit_is_balanced() -> None:
    keys = noise.row_keys(torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64), torch.arange(64))
    bits = noise.random_bits(keys, noise.token_terms(4096, torch.device("cpu")))
    for place in range(32):
        ones = int(((bits >> place) & 1).sum())
        assert abs(ones - bits.numel() / 2) < 5 * np.sqrt(bits.numel()) / 2
    gumbel = noise.gumbel(keys, noise.token_terms(4096, torch.device("cpu"))).double()
    assert bool(gumbel.isfinite().all())
    assert abs(float(gumbel.mean()) - 0.5772) < 0.02 and abs(float(gumbel.var()) - np.pi**2 / 6) < 0.05
