"""The law: on real weights (the embedded SmolLM2, fp32, CPU) the engine computes what transformers computes.

Chat prompts of 10 to 3,000 tokens with 64 new tokens each, alone and all in one batch: teacher-forced logits differ by
at most 1e-3 at every position, greedy ids are equal by the identity rule, with at most 2 ties in 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from engine_proc.loader import load
from engine_proc.runner import Runner
from tests.identity import Identity
from tests.model import driver_logits
from tests.model.driver import Driver, state
from tests.model.driver_logits import Forced

CHUNK = 512
LENGTHS = tuple(round(float(length)) for length in np.geomspace(10, 3000, 20))
SUBJECTS = (
    "A river",
    "The committee",
    "My neighbour",
    "An old clock",
    "The library",
    "A young engineer",
    "This recipe",
)
VERBS = ("changes", "describes", "follows", "remembers", "measures", "repairs", "explains")
OBJECTS = (
    "the shape of the valley",
    "a list of numbers",
    "how bread is made",
    "the history of the town",
    "7 small birds",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted model, as the first start of the service leaves it."""
    found = sorted((Path.home() / ".cache" / "deepinfer" / "models").glob("smollm2-135m-instruct-*/config.json"))
    if not found:
        pytest.skip("the embedded model has not been converted on this machine: start the service once")
    return found[0].parent


def text(words: int, seed: int) -> str:
    pick = np.random.default_rng(seed)
    sentences = [
        f"{pick.choice(SUBJECTS)} {pick.choice(VERBS)} {pick.choice(OBJECTS)} for the {count}th time."
        for count in range(words // 6 + 1)
    ]
    return " ".join(sentences)


def chat(tokenizer: Tokenizer, length: int) -> list[int]:
    """A user's turn that begins with a question, exactly `length` tokens with its marks."""
    head = tokenizer.encode("<|im_start|>user\n").ids
    tail = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n").ids
    body = tokenizer.encode(f"Tell me what this is about. {text(length, length)}").ids
    return [*head, *body[: length - len(head) - len(tail)], *tail]


@dataclass
class Reference:
    """What transformers computes for one prompt."""

    prompt: list[int]
    ids: list[int]
    hidden: torch.Tensor  # [prompt + ids, hidden], after the last norm
    head: torch.Tensor

    def logits(self, first: int, end: int) -> torch.Tensor:
        return self.hidden[first:end] @ self.head.T

    def produced(self, index: int) -> Any:
        at = len(self.prompt) - 1 + index
        return self.logits(at, at + 1)[0].numpy()


class Compared(Forced):
    """Checks each piece of logits against the reference and keeps none."""

    def __init__(self, driver: Driver, reference: Reference) -> None:
        super().__init__(driver, reference.prompt + reference.ids, len(reference.prompt), CHUNK)
        self.reference = reference

    def take(self, start: int, logits: torch.Tensor) -> None:
        expected = self.reference.logits(start, start + len(logits))
        difference = float((expected - logits).abs().max())
        assert difference < 1e-3, f"prompt of {len(self.reference.prompt)}, from position {start}: {difference}"


def references(folder: Path, lengths: Sequence[int], new: int) -> list[Reference]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for length in lengths:
            prompt = chat(tokenizer, length)
            assert len(prompt) == length
            given = torch.tensor([prompt])
            mask = torch.ones_like(given)
            whole = model.generate(
                given, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            hidden = model.model(whole).last_hidden_state[0]
            found.append(Reference(prompt, whole[0, length:].tolist(), hidden, model.lm_head.weight.detach()))
    return found


def check(folder: Path, lengths: Sequence[int], new: int, ties: int) -> None:
    expected = references(folder, lengths, new)
    loaded = load(folder, "cpu", "fp32", "safetensors", lambda done, total: None)
    blocks = sum(-(-(length + new) // loaded.model.cache_spec.block_tokens) for length in lengths)
    runner = Runner(loaded, blocks, len(lengths))
    driver = Driver(runner, shuffle_seed=1)
    batches = [[reference] for reference in expected] + [expected]
    for batch in batches:
        driver_logits.run(driver, [Compared(driver, reference) for reference in batch])
    for which in (batches[:-1], batches[-1:]):
        identity = Identity("fp32")
        for batch in which:
            sequences = [driver.start(state(reference.prompt), new) for reference in batch]
            driver.run(sequences, new, CHUNK)
            driver.stop(sequences)
            for reference, sequence in zip(batch, sequences, strict=True):
                identity.same(reference.ids, sequence.ids, reference.produced, f"prompt of {len(reference.prompt)}")
        identity.at_most(ties)


def test_logits_and_ids_match_transformers_for_three_chats(folder: Path) -> None:
    check(folder, (10, 129, 600), 16, ties=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_logits_and_ids_match_transformers_for_twenty_chats(folder: Path) -> None:
    check(folder, LENGTHS, 64, ties=2)
