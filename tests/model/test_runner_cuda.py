"""The law: on a CUDA device a step is launched without waiting for the device, and produces what the CPU produces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine_proc.loader import load
from engine_proc.plan import Row, StepPlan
from engine_proc.runner import Runner
from tests.identity import GAPS
from tests.model.driver import Driver, params, state
from tests.model.driver_logits import Forced
from tests.model.driver_logits import run as forced_logits
from tests.model.unpacked import unpacked

pytestmark = pytest.mark.gpu

VOCAB = 500
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
}
LENGTHS = (1, 16, 17, 130, 600, 1500)
NEW = 20
WISHES = (
    params(),
    params(temperature=0.8, seed=3, top_p=0.9),
    params(temperature=1.2, seed=-9, top_k=12, repetition_penalty=1.2),
    params(presence_penalty=0.5, frequency_penalty=0.3, logprobs=4),
    params(temperature=0.6, seed=5, min_p=0.05, logit_bias={7: 2.5}),
    params(temperature=1.0, seed=2**62, logprobs=0),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose logits lie further apart than rounding, written without transformers."""
    path = tmp_path_factory.mktemp("cuda")
    (path / "config.json").write_text(json.dumps(CONFIG))
    with unpacked():
        model = load(path, "cpu", "fp32", "random", lambda done, total: None, 16).model
    weights = {
        name: (place if "norm" in name else place * 4).contiguous() for name, place in model.destinations().items()
    }
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.set_sync_debug_mode("default")


def runner(folder: Path, device: str, dtype: str = "fp32", cuda_graphs: bool = True) -> Runner:
    loaded = load(folder, device, dtype, "safetensors", lambda done, total: None, 16)
    return Runner(loaded, 256, 8, cuda_graphs=cuda_graphs)


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(21)
    return [generator.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def produced(on: Runner, chunk: int = 400) -> tuple[list[list[int]], list[Any]]:
    driver = Driver(on, shuffle_seed=1)
    sequences = [driver.start(state(p, w), NEW) for p, w in zip(prompts(), WISHES, strict=True)]
    driver.run(sequences, NEW, chunk)
    return [sequence.ids for sequence in sequences], [sequence.logprobs for sequence in sequences]


def test_cuda_produces_the_ids_and_logprobs_of_the_cpu(folder: Path) -> None:
    ids, logprobs = produced(runner(folder, "cpu"))
    cuda_ids, cuda_logprobs = produced(runner(folder, "cuda"))
    assert cuda_ids == ids
    for left, right in zip(logprobs, cuda_logprobs, strict=True):
        for ours, theirs in zip(left, right, strict=True):
            assert ours.top_ids == theirs.top_ids and abs(ours.logprob - theirs.logprob) < 1e-3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("chunk", [48, 400, 2000])  # steps in graphs alone, some of them, and eager ones
def test_captured_steps_give_the_ids_of_eager_ones(folder: Path, dtype: str, chunk: int) -> None:
    captured = produced(runner(folder, "cuda", dtype), chunk)
    assert captured == produced(runner(folder, "cuda", dtype, cuda_graphs=False), chunk)


@pytest.mark.parametrize("chunk", [48, 2000])
def test_short_chunks_in_graphs_give_the_ids_of_the_cpu(folder: Path, chunk: int) -> None:
    assert produced(runner(folder, "cuda"), chunk)[0] == produced(runner(folder, "cpu"))[0]


def test_cuda_gives_the_logits_of_the_cpu_and_bf16_the_ids(folder: Path) -> None:
    found: dict[str, list[torch.Tensor]] = {}
    for device, dtype in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")):
        driver = Driver(runner(folder, device, dtype), shuffle_seed=1)
        sequences = [Forced(driver, p + [5] * 6, len(p), 400) for p in prompts()]
        found[f"{device} {dtype}"] = [part.float().cpu() for part in forced_logits(driver, sequences)]
    differ = positions = 0
    for row in range(len(LENGTHS)):
        reference, rounded = found["cpu fp32"][row], found["cuda bf16"][row]
        assert (reference - found["cuda fp32"][row]).abs().max() < 1e-3
        best, chosen = reference.argmax(-1), rounded.argmax(-1)
        gaps = (reference.gather(1, best[:, None]) - reference.gather(1, chosen[:, None]))[:, 0]
        assert gaps.max() < GAPS["bf16"], f"prompt of {LENGTHS[row]}: another id where no tie is"
        differ += int((best != chosen).sum())
        positions += len(reference)
    assert differ < 0.05 * positions, f"{differ} of {positions} ids differ"


def test_a_launch_never_waits_for_the_device(folder: Path) -> None:
    """Steps follow each other without reading an id on the host; torch raises at any hidden wait."""
    on_cuda = runner(folder, "cuda")
    driver = Driver(on_cuda, shuffle_seed=1)
    sequences = [driver.start(state(p, w), NEW) for p, w in zip(prompts(), WISHES, strict=True)]
    driver.run(sequences, 2, chunk=400)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    pending = []
    for _ in range(NEW - 2):
        rows = [Row(s.slot, s.at, 1, None, s.blocks, True) for s in sequences]
        pending.append(on_cuda.launch(StepPlan(rows, len(rows))))
        for sequence in sequences:
            sequence.at += 1
    on_cuda.open_slot(
        7, state([1, 2, 3], params(presence_penalty=1.0, logit_bias={3: 1.0}), stop_ids=[4], min_position=9)
    )
    torch.cuda.set_sync_debug_mode("default")
    for step in pending:
        for sequence, found in zip(sequences, step.result().ids.tolist(), strict=True):
            sequence.ids.append(found)
    assert [sequence.ids for sequence in sequences] == produced(runner(folder, "cpu"))[0]
