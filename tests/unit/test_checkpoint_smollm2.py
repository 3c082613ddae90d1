"""The law: the default model's tokenizer, as converted, encodes like its definition and gives back every text.

Runs where the model is in the user's cache (the first start of the service, or serve/get_model.py, puts it there).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tokenizers import Tokenizer

from engine_proc.checkpoint import embedded, folder, store
from tests.unit.checkpoint_world import byte_alphabet
from tests.unit.test_checkpoint_tokenizer import ALPHABET, PATTERNS, merged, split

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer_file() -> Path:
    cache = folder.default_cache_dir(os.environ, Path.home())
    path = store.entry(cache, embedded.DEFAULT, embedded.MODELS[embedded.DEFAULT].sha256) / "tokenizer.json"
    if not path.is_file():
        pytest.skip("the default model is not in the cache: python serve/get_model.py smollm2-135m-instruct")
    return path


class Reference:
    """Byte-pair encoding as defined, over the vocabulary and merges of the file.

    The vocabulary lacks 21 bytes: six control characters, and bytes that only unassigned characters or no UTF-8 at all
    would need. The model has no unknown token, so they are left out, as its other implementations do.
    """

    def __init__(self, path: Path) -> None:
        model: dict[str, Any] = json.loads(path.read_text("utf-8"))["model"]
        self.ids: dict[str, int] = model["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        self.letters = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        found = []
        for piece in split(text, PATTERNS["smollm"]):
            word = [self.letters[byte] for byte in piece.encode("utf-8")]
            found += [self.ids[token] for token in merged(word, self.ranks) if token in self.ids]
        return found


def test_known_ids(tokenizer_file: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    assert tokenizer.get_vocab_size() == 49152
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert tokenizer.encode(chat).ids == [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    assert [tokenizer.id_to_token(index) for index in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special == set(range(17))
    known = tokenizer.get_vocab()
    missing = [byte for byte, letter in enumerate(byte_alphabet()) if letter not in known]
    assert [byte for byte in missing if byte < 0xC0] == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]
    assert [byte for byte in missing if byte >= 0xC0] == [0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)]


def test_any_text_encodes_as_defined_and_comes_back(tokenizer_file: Path) -> None:
    tokenizer, reference = Tokenizer.from_file(str(tokenizer_file)), Reference(tokenizer_file)

    def check(text: str) -> None:
        found = tokenizer.encode(text).ids
        assert found == reference.encode(text)
        if not any(reference.letters[byte] not in reference.ids for byte in text.encode("utf-8")):
            assert tokenizer.decode(found) == text

    @given(text=some.one_of(some.text(max_size=80), some.text(some.sampled_from(ALPHABET), max_size=80)))
    def check_drawn(text: str) -> None:
        check(text)

    check_drawn()
    for path in sorted((ROOT / "wire").glob("*.py")):
        check(path.read_text("utf-8"))
    for text in (
        "",
        " ",
        "\n\n\n",
        "\t\tx = 1  # y\r\n",
        "２０２６年 ½ Ⅷ ٣",
        "naïve café — “quoted”",
        "👩‍👩‍👧🏽 e\u0301",
        "\u0000\ufffd",
    ):
        check(text)
