"""The law: on real weights (the embedded SmolLM2) a CUDA device in bf16 gives the CPU's ids by the identity rule.

The CPU computes in fp32. Against that bf16 has a tie in nearly every text of some length, so ties are not bounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine_proc.loader import load
from engine_proc.runner import Runner
from tests.identity import Identity
from tests.model import driver_logits
from tests.model.driver import Driver, state
from tests.model.driver_logits import Forced
from tests.model.test_embedded_smollm2 import chat, folder

pytestmark = pytest.mark.gpu

__all__ = ["folder"]  # the fixture

LENGTHS = tuple(round(float(length)) for length in np.geomspace(10, 1200, 8))
NEW, CHUNK = 64, 600


def engine(folder: Path, device: str, dtype: str) -> Driver:
    loaded = load(folder, device, dtype, "safetensors", lambda done, total: None)
    return Driver(Runner(loaded, 64, len(LENGTHS)), shuffle_seed=1)


def produced(driver: Driver, prompts: list[list[int]]) -> list[list[int]]:
    sequences = [driver.start(state(prompt), NEW) for prompt in prompts]
    driver.run(sequences, NEW, CHUNK)
    driver.stop(sequences)
    return [sequence.ids for sequence in sequences]


def test_a_device_gives_the_ids_of_the_cpu(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [chat(tokenizer, length) for length in LENGTHS]
    on_cpu = engine(folder, "cpu", "fp32")
    expected, actual = produced(on_cpu, prompts), produced(engine(folder, "cuda", "bf16"), prompts)
    identity = Identity("bf16")
    for prompt, reference, ids in zip(prompts, expected, actual, strict=True):

        def logits_at(index: int, prompt: list[int] = prompt, reference: list[int] = reference) -> Any:
            known = prompt + reference[:index]
            return driver_logits.run(on_cpu, [Forced(on_cpu, known, len(known), CHUNK)])[0][-1].numpy()

        identity.same(reference, ids, logits_at, f"prompt of {len(prompt)}")
    print(f"ties: {[(tie.name, tie.index, round(tie.gap, 4)) for tie in identity.ties]}")
