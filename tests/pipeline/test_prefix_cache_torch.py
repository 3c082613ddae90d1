"""A cached prefix changes no number (behaviours 49, 54, 57 with the torch engine and a tiny random Llama, fp32, CPU).

54: the ids with the prefix on the device equal the cold ones, first-step log-probabilities differ by less than 1e-4.
49: a tiny temperature is greedy, and nothing is ever NaN.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.harness import TINY, Service, service
from tests.pipeline.web import together

COMPLETIONS = "/v1/completions"
BLOCK = 128
LENGTHS = [1, 127, 128, 129, 255, 256, 257, 600]


def random_llama(folder: Path) -> Path:
    """The tiny tokenizer with a two-layer Llama of random weights (fixed seed), 1,024 positions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(TINY, folder)
    original = json.loads((TINY / "config.json").read_text())
    torch.manual_seed(54)
    config = LlamaConfig(
        vocab_size=original["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.3,  # large enough for clear maxima
        eos_token_id=original.get("eos_token_id"),
        bos_token_id=original.get("bos_token_id"),
    )
    LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The torch engine with the random model."""
    folder = tmp_path_factory.mktemp("real")
    flags = ("--device", "cpu", "--dtype", "fp32")
    with service(folder / "service", *flags, model=random_llama(folder / "model"), engine="torch") as found:
        yield found


def ids_of(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, 250) for _ in range(count)]


def run(server: Service, ids: list[int], **fields: Any) -> tuple[list[str], list[dict[str, float]], int]:
    """Greedy: tokens with their log-probabilities' tops, and the number of cached prompt tokens."""
    body = server.prompt_body(ids, **{"max_tokens": 64, "ignore_eos": True, "temperature": 0, "logprobs": 5, **fields})
    answer = server.post(COMPLETIONS, body, timeout=60)
    assert answer.status == 200, answer.body
    found = answer.json()["choices"][0]["logprobs"]
    assert all(math.isfinite(value) for value in found["token_logprobs"])
    return found["tokens"], found["top_logprobs"], answer.usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("length", LENGTHS)
def test_54_a_cached_prefix_changes_nothing(real: Service, length: int) -> None:
    ids = ids_of(length, length)
    cold_tokens, cold_tops, cold_cached = run(real, ids)
    tokens, tops, cached = run(real, ids)
    assert (cold_cached, cached) == (0, (length - 1) // BLOCK * BLOCK)
    assert tokens == cold_tokens
    assert tops[0].keys() == cold_tops[0].keys()
    assert max(abs(tops[0][token] - cold_tops[0][token]) for token in tops[0]) < 1e-4


def test_54_a_longer_prompt_on_a_cached_prefix(real: Service) -> None:
    ids, more = ids_of(1000, 300), ids_of(1001, 100)
    cold = run(real, ids + more, prefix_cache=False)
    run(real, ids)
    again = run(real, ids + more)
    assert (cold[2], again[2]) == (0, 256)
    assert again[0] == cold[0]


def test_54_solo_and_together_are_the_same(real: Service) -> None:
    prompts = [ids_of(2000 + number, 20 + 90 * number) for number in range(5)]
    solo = [run(real, ids, prefix_cache=False)[0] for ids in prompts]
    batched = [found[0] for found in together([partial(run, real, ids) for ids in prompts])]
    assert batched == solo


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-6}, {"temperature": 1e-6, "top_p": 1e-6, "top_k": 3}, {"top_k": 1}]
)
def test_49_tiny_temperatures_are_greedy(real: Service, fields: dict[str, float]) -> None:
    ids = ids_of(3000, 50)
    greedy = run(real, ids)
    assert run(real, ids, **{"temperature": 1.0, "seed": 5, **fields})[0] == greedy[0]


def test_49_a_seed_repeats_and_another_differs(real: Service) -> None:
    ids = ids_of(4000, 50)
    first, again, other = (run(real, ids, temperature=1.5, seed=seed)[0] for seed in (7, 7, 8))
    assert first == again != other
