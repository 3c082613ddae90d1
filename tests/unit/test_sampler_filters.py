"""The law: filters, penalties, biases and logprobs compute what a plain reference computes, row by row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine_proc import filters
from engine_proc.sampler import Sampled, Sampler
from engine_proc.slots import SlotTable
from engine_proc.upload import Upload
from tests.model.driver import params, state
from wire.messages import Params

VOCAB = 3000
CPU = torch.device("cpu")
Row = npt.NDArray[np.float64]


def reference_keep(z: Row, min_p: float, top_k: int, top_p: float) -> npt.NDArray[np.bool_]:
    """Which ids stay: min_p, then top_k, then top_p on what is left; ties with the last one stay."""
    weights = np.exp(z - z.max())
    keep = weights >= min_p
    if top_k > 0:
        keep &= weights >= np.sort(weights)[::-1][top_k - 1]
    if top_p < 1:
        left = np.sort(weights[keep])[::-1]
        size = int((np.cumsum(left) < top_p * left.sum() * (1 - 1e-7)).sum())
        keep &= weights >= left[min(size, len(left) - 1)]
    return np.asarray(keep)


@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_filters_keep_what_the_reference_keeps(spread: float) -> None:
    generator = np.random.default_rng(8)
    rows = 60
    logits = (generator.normal(0, spread, (rows, VOCAB))).astype(np.float32)
    min_p = generator.choice([0.0, 0.02, 0.5, 1.0], rows)
    top_k = generator.choice([0, 1, 2, 40, 2000], rows)
    top_p = generator.choice([1.0, 0.999, 0.9, 0.3, 1e-6], rows)
    z = filters.keep_likely(
        torch.from_numpy(logits.copy()),
        torch.from_numpy(min_p).float(),
        torch.from_numpy(top_k),
        2000,
        torch.from_numpy(top_p).float(),
    )
    kept = z.isfinite().numpy()
    for row in range(rows):
        z64 = logits[row].astype(np.float64)
        expected = reference_keep(z64, min_p[row], int(top_k[row]), top_p[row])
        # where a sum meets the limit within rounding, one id more or less is right
        assert abs(int(kept[row].sum()) - int(expected.sum())) <= 1
        assert (kept[row] & ~expected).sum() <= 1 and (expected & ~kept[row]).sum() <= 1
        assert kept[row][z64.argmax()]


def test_both_ways_to_the_nucleus_agree() -> None:
    generator = torch.Generator().manual_seed(3)
    for spread in (0.01, 1.0, 8.0):
        z = torch.randn(40, VOCAB, generator=generator) * spread
        weights = (z - z.amax(-1, keepdim=True)).exp()
        top_p = torch.rand(40, generator=generator) * 0.999
        ranked = filters.nucleus_by_rank(weights, top_p)
        halved = filters.nucleus_by_bisection(weights, top_p)
        sizes = [(weights >= threshold[:, None]).sum(-1) for threshold in (ranked, halved)]
        assert int((sizes[0] - sizes[1]).abs().max()) <= 1
        mass = torch.where(weights >= halved[:, None], weights, 0).double().sum(-1) / weights.double().sum(-1)
        assert bool((mass > top_p - 1e-5).all())


def test_ties_at_a_threshold_all_stay() -> None:
    z = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = filters.keep_likely(z.clone(), None, torch.tensor([2]), 2, None).isfinite()
    assert kept.tolist() == [[False, True, True, True, False]]
    for find in (filters.nucleus_by_rank, filters.nucleus_by_bisection):
        weights = (z - 2).exp()
        assert float(find(weights, torch.tensor([0.3]))) == 1.0


def sample(
    table: SlotTable, logits: torch.Tensor, slots: list[int], positions: list[int], poisoned: list[int]
) -> Sampled:
    upload = Upload(CPU)
    sampler = Sampler(table)
    plan = sampler.plan(np.array(slots), np.array(positions), poisoned, upload)
    upload.send()
    return sampler.sample(logits.clone(), plan)


def reference_penalised(logits: Row, prompt: list[int], produced: list[int], wish: Params) -> Row:
    out = logits.copy()
    for token in set(prompt) | set(produced):
        out[token] = out[token] / wish.repetition_penalty if out[token] > 0 else out[token] * wish.repetition_penalty
    for token in set(produced):
        out[token] -= wish.frequency_penalty * produced.count(token) + wish.presence_penalty
    return out


def test_penalties_follow_the_reference_as_ids_are_produced() -> None:
    """Greedy under penalties, step after step, three penalised sequences and a plain one; two are rebuilt midway."""
    vocab, steps = 20, 30
    generator = np.random.default_rng(1)
    wishes = [
        params(repetition_penalty=1.3),
        params(),
        params(frequency_penalty=0.4, presence_penalty=-0.3),
        params(repetition_penalty=0.8, frequency_penalty=0.2, presence_penalty=0.9),
    ]
    prompts = [[1, 2, 3], [4], [5, 5, 6], [7, 8]]
    produced: list[list[int]] = [[] for _ in wishes]
    table = SlotTable(4, vocab, CPU)
    for slot, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        table.open(slot, state(prompt, wish))
    for step in range(steps):
        if step == steps // 2:
            table.close(3)
            table.close(0)
            table.open(3, state(prompts[3], wishes[3], produced=produced[3]))
            table.open(0, state(prompts[0], wishes[0], produced=produced[0]))
        logits = generator.normal(0, 0.5, (4, vocab)).astype(np.float32)
        ids = sample(table, torch.from_numpy(logits), [0, 1, 2, 3], [3 + step] * 4, []).ids.tolist()
        for slot, wish in enumerate(wishes):
            expected = reference_penalised(logits[slot].astype(np.float64), prompts[slot], produced[slot], wish)
            assert ids[slot] == int(expected.argmax())
            produced[slot].append(ids[slot])


def test_counts_are_kept_only_for_penalised_slots_and_used_again() -> None:
    table = SlotTable(8, 50, CPU)
    table.open(0, state([1], params()))
    assert len(table.counts.counts) == 0
    for _ in range(20):
        table.open(1, state([1], params(presence_penalty=1.0), produced=[3, 3]))
        table.open(2, state([2], params(repetition_penalty=2.0)))
        assert len(table.counts.counts) <= 2
        row = table.counts.counts[int(table.traits.counts_row[1])]
        assert row[1] == 1 and row[3] == 4 and row.sum() == 5
        table.close(1)
        table.close(2)


def test_biases_and_bans_act_before_the_choice() -> None:
    table = SlotTable(5, 10, CPU)
    logits = torch.zeros(5, 10)
    logits[:, 4] = 1.0
    table.open(0, state([1], params(logit_bias={7: 1.5, 0: 0.25})))
    table.open(1, state([1], params(logit_bias={4: -100.0, 9: 0.5})))
    table.open(2, state([1], params(temperature=1.0, top_k=1, logit_bias={2: 3.0}), banned_ids=[2, 4, 0], stop_ids=[]))
    table.open(3, state([1], stop_ids=[4, 5], min_position=12))
    table.open(4, state([1]))
    before = sample(table, logits, [0, 1, 2, 3, 4], [11] * 5, []).ids.tolist()
    assert before[:2] == [7, 9] and before[2] not in (2, 4, 0) and before[3] not in (4, 5) and before[4] == 4
    after = sample(table, logits, [0, 1, 2, 3, 4], [12] * 5, []).ids.tolist()
    assert after[3] == 4, "from min_position on, stop ids may come"
    table.close(0)
    table.open(0, state([1]))
    assert sample(table, logits[:1], [0], [11], []).ids.tolist() == [4], "a former sequence's biases are gone"


def test_a_row_that_is_not_finite_is_reported_and_disturbs_nobody() -> None:
    table = SlotTable(6, VOCAB, CPU)
    wishes = [params(), params(temperature=1.0, seed=1, top_p=0.9), params(temperature=0.7, top_k=5, logprobs=2)]
    for slot in range(6):
        table.open(slot, state([1], wishes[slot % 3]))
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2))
    clean = sample(table, logits, list(range(6)), [9] * 6, [])
    assert bool(clean.finite.all())
    broken = logits.clone()
    broken[1, 17] = float("inf")
    broken[3, 5] = float("nan")
    found = sample(table, broken, list(range(6)), [9] * 6, [2])
    assert found.finite.tolist() == [True, False, False, False, True, True]
    assert found.ids[[0, 4, 5]].equal(clean.ids[[0, 4, 5]])
    assert bool(((found.ids >= 0) & (found.ids < VOCAB)).all())


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    table = SlotTable(3, VOCAB, CPU)
    table.open(
        0, state([1], params(temperature=0.5, top_k=2, logit_bias={5: 50.0}, logprobs=20, repetition_penalty=1.5))
    )
    table.open(1, state([1], params()))
    table.open(2, state([1], params(logprobs=0)))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(6)) * 3
    found = sample(table, logits, [0, 1, 2], [4, 4, 4], [])
    assert found.ids[0] == 5 and found.logprobs is not None and found.top_ids is not None
    expected = logits.double().log_softmax(-1)
    assert abs(float(found.logprobs[0, 0]) - float(expected[0, 5])) < 1e-5
    assert abs(float(found.logprobs[1, 0]) - float(expected[2].max())) < 1e-5
    assert found.top_ids[0].tolist() == logits[0].topk(20).indices.tolist()
    assert np.allclose(found.logprobs[0, 1:].numpy(), expected[0].topk(20).values.numpy(), atol=1e-5)


def test_slots_are_opened_and_closed_once() -> None:
    table = SlotTable(1, 10, CPU)
    table.open(0, state([1]))
    with pytest.raises(RuntimeError, match="open already"):
        table.open(0, state([1]))
    table.close(0)
    with pytest.raises(RuntimeError, match="not open"):
        table.close(0)
