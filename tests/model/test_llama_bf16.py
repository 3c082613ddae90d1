"""The law: in bf16 the engine gives the ids that transformers gives in bf16, by the identity rule for bf16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine_proc.loader import load
from engine_proc.runner import Runner
from tests.identity import Identity
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.driver import Driver, state

LENGTHS = (1, 16, 40, 300)
NEW = 16


@pytest.mark.parametrize("member", ["llama", "llama_biased", "qwen2", "qwen3", "mistral"])
def test_greedy_ids_match_transformers_in_bf16(member: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, member).to(torch.bfloat16)
    generator = np.random.default_rng(12)
    prompts = [generator.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    runner = Runner(load(tmp_path, "cpu", "bf16", "safetensors", lambda done, total: None, 16), 64, len(LENGTHS))
    driver = Driver(runner, shuffle_seed=2)
    sequences = [driver.start(state(prompt), NEW) for prompt in prompts]
    driver.run(sequences, NEW, chunk=64)
    identity = Identity("bf16")
    for prompt, sequence in zip(prompts, sequences, strict=True):
        with torch.no_grad():  # the reference's choice at each position, given the ids so far
            logits = model(torch.tensor([prompt + sequence.ids])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.argmax(-1).tolist()
        identity.same(expected, sequence.ids, lambda i, x=logits: x[i].numpy(), f"{member}, {len(prompt)}")  # type: ignore[misc]
