"""The law: a tokenizer built from GGUF metadata encodes as its definition says, and decodes back what it encoded.

The references are written out here: byte-pair merging by rank after splitting with a pattern, and SentencePiece's
joining of the best-scored neighbours.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as some
from tokenizers import Tokenizer

from engine_proc.checkpoint import gguf_tokenizer
from tests.unit import checkpoint_world as world

FILE = Path("some/model.gguf")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
ALPHABET = "theand 1234567890'sS \n\t\r.,!?<|>$_#ÄéЖ日本語🙂\u0301\u00a0½Ⅷ"
TEXTS = some.one_of(some.text(some.sampled_from(ALPHABET), max_size=60), some.text(max_size=30))


def split(text: str, patterns: list[str]) -> list[str]:
    """Each pattern cuts every piece into its matches and what lies between."""
    pieces = [text]
    for pattern in patterns:
        cut: list[str] = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                cut += [piece[at : match.start()], match[0]]
                at = match.end()
            cut.append(piece[at:])
        pieces = [piece for piece in cut if piece]
    return pieces


def merged(word: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    while True:
        pairs = [(ranks[pair], index) for index, pair in enumerate(pairwise(word)) if pair in ranks]
        if not pairs:
            return word
        _, index = min(pairs)
        word = [*word[:index], word[index] + word[index + 1], *word[index + 2 :]]


def reference(text: str, pre: str, metadata: dict[str, Any]) -> list[int]:
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    letters = world.byte_alphabet()
    found = []
    for piece in split(text, PATTERNS[pre]):
        word = [letters[byte] for byte in piece.encode("utf-8")]
        if pre == "llama-bpe" and "".join(word) in ids:
            found.append(ids["".join(word)])
        else:
            found += [ids[token] for token in merged(word, ranks)]
    return found


def built(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(gguf_tokenizer.build(metadata, FILE).tokenizer))


@pytest.mark.parametrize("pre", PATTERNS)
def test_byte_pair_tokenizers_encode_as_defined(pre: str) -> None:
    metadata = world.byte_pair_metadata(pre)
    tokenizer = built(metadata)

    @given(text=TEXTS)
    def check(text: str) -> None:
        if any(special in text for special in world.SPECIALS):
            return
        # Qwen's reference tokenizer composes characters first.
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == reference(normal, pre, metadata)
        assert tokenizer.decode(found) == normal

    check()


def test_digits_stay_alone_for_smollm_and_words_do_not() -> None:
    tokenizer = built(world.byte_pair_metadata("smollm"))
    assert tokenizer.encode("the and 123").tokens == ["the", "Ġand", "Ġ", "1", "2", "3"]
    assert built(world.byte_pair_metadata("llama-bpe")).encode("123").tokens[-1] == "123"


def test_a_word_that_is_a_token_is_taken_whole_for_llama_only() -> None:
    assert built(world.byte_pair_metadata("llama-bpe")).encode("hand", add_special_tokens=False).tokens == ["hand"]
    assert built(world.byte_pair_metadata("qwen2")).encode("hand").tokens == ["h", "and"]


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    metadata = world.byte_pair_metadata("smollm", extra=("<tool>",))
    tokenizer = built(metadata)
    encoding = tokenizer.encode("<|im_start|>the<tool><|im_end|>")
    assert encoding.tokens == ["<|im_start|>", "the", "<tool>", "<|im_end|>"]
    assert tokenizer.decode(encoding.ids) == "the<tool>"
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "<|im_start|>the<tool><|im_end|>"
    added = gguf_tokenizer.build(metadata, FILE).tokenizer["added_tokens"]
    assert [(token["content"], token["special"]) for token in added] == [
        ("<|endoftext|>", True),
        ("<|im_start|>", True),
        ("<|im_end|>", True),
        ("<tool>", False),
    ]


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    metadata = world.byte_pair_metadata("smollm")
    assert built(metadata).encode("the").tokens == ["the"]
    assert built({**metadata, "tokenizer.ggml.add_bos_token": True}).encode("the").tokens == ["<|im_start|>", "the"]
    both = {**metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert built(both).encode("the").tokens == ["<|im_start|>", "the", "<|im_end|>"]
    assert built(world.byte_pair_metadata("llama-bpe")).encode("the").tokens == ["<|im_start|>", "the"]


def test_the_template_the_names_and_every_end_of_a_turn_go_into_the_folder() -> None:
    metadata = world.byte_pair_metadata("smollm")
    files = gguf_tokenizer.build(metadata, FILE)
    assert files.config["chat_template"] == metadata["tokenizer.chat_template"]
    assert (files.config["bos_token"], files.config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert files.config["add_bos_token"] is False
    assert (files.bos_id, files.eos_ids) == (1, (2,))
    # A file that calls another token its eos: what the template closes a turn with ends generation all the same.
    assert gguf_tokenizer.build({**metadata, "tokenizer.ggml.eos_token_id": 0}, FILE).eos_ids == (0, 2)
    assert gguf_tokenizer.build({**metadata, "tokenizer.ggml.eot_token_id": 1}, FILE).eos_ids == (1, 2)


# --- SentencePiece --------------------------------------------------------------------------------------------------

PIECES = [
    "▁t",
    "he",
    "▁the",
    "th",
    "an",
    "and",
    "▁and",
    "aa",
    "aaa",
    "t",
    "h",
    "e",
    "a",
    "n",
    "d",
    "▁",
    "\n",
    "日",
    ".",
]
USER = ["  ", "   ", "\n\n", "<b>"]


def sentence_piece_metadata(**changes: Any) -> dict[str, Any]:
    head = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    data = [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*head, *USER, *data, *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(head) + [4] * len(USER) + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.scores": [-1000.0] * (len(head) + len(USER))
        + [0.0] * 256
        + [-float(index) for index in range(len(PIECES))],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def joined(text: str) -> list[str]:
    """SentencePiece: user-defined pieces first, the longest at each place; then the best-scored neighbours join."""
    scores = {piece: -index for index, piece in enumerate(PIECES)}
    user = sorted((piece.replace(" ", "▁") for piece in USER), key=len, reverse=True)
    found: list[str] = []
    run: list[str] = []

    def flush() -> None:
        word, run[:] = list(run), []
        while True:
            pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(word)) if a + b in scores]
            if not pairs:
                break
            _, index = min(pairs)
            word[index : index + 2] = [word[index] + word[index + 1]]
        for piece in word:
            found.extend([piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode("utf-8")])

    rest = text.replace(" ", "▁")
    while rest:
        piece = next((one for one in user if rest.startswith(one)), None)
        if piece:
            flush()
            found.append(piece)
        else:
            run.append(rest[0])
        rest = rest[len(piece or rest[0]) :]
    flush()
    return found


def test_sentence_piece_joins_by_score() -> None:
    tokenizer = built(sentence_piece_metadata())

    @given(text=some.one_of(some.text(some.sampled_from("thean d  \n.日x<b>é🙂"), max_size=40), some.text(max_size=20)))
    def check(text: str) -> None:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert encoding.tokens == joined(text)
        assert tokenizer.decode(encoding.ids) == text.replace("▁", " ")

    check()


def test_sentence_piece_adds_bos_and_knows_its_turn_marks() -> None:
    tokenizer = built(sentence_piece_metadata())
    assert tokenizer.encode("<start_of_turn>the   and").tokens == ["<bos>", "<start_of_turn>", "t", "he", "▁▁▁", "and"]
    template = {"tokenizer.chat_template": "{{ m }}<end_of_turn>"}
    assert gguf_tokenizer.build({**sentence_piece_metadata(), **template}, FILE).eos_ids == (1, 5)


def test_a_space_in_front_is_added_and_taken_away_again() -> None:
    metadata = sentence_piece_metadata(add_space_prefix=True)
    tokens = metadata["tokenizer.ggml.tokens"]
    for index, token in enumerate(tokens):
        if token in USER[:2]:
            tokens[index] = f"<user{index}>"
    tokenizer = built(metadata)
    encoding = tokenizer.encode("the and", add_special_tokens=False)
    assert encoding.tokens == ["▁the", "▁and"]
    assert tokenizer.decode(encoding.ids) == "the and"
    with pytest.raises(ValueError, match=r"user-defined piece '▁▁' together with add_space_prefix"):
        built(sentence_piece_metadata(add_space_prefix=True))


def test_what_cannot_be_built_is_refused_by_name() -> None:
    good = world.byte_pair_metadata("smollm")
    pieces = sentence_piece_metadata()

    def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return {**base, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}

    cases = [
        (changed(good, model="bert"), r"kind 'bert' \(tokenizer.ggml.model\); accepted are gpt2, llama"),
        (changed(good, pre="tekken"), r"'tekken' is not known; accepted are smollm, llama-bpe"),
        (world.byte_pair_metadata(None), r"which is missing; accepted are smollm"),
        (changed(good, tokens=["a", "a"], token_type=[1, 1]), r"the token 'a' twice"),
        (changed(good, token_type=[1]), r"tokens but 1 token types"),
        (changed(good, merges=["t q"]), r"merge 't q', which does not make a token"),
        (changed(good, merges=["the"]), r"merge 'the', which does not make a token"),
        (changed(good, eos_token_id=10**6), r"eos_token_id 1000000, outside its"),
        (changed(pieces, scores=[1.0]), r"no score for each token"),
        (changed(pieces, remove_extra_whitespaces=True), r"removes extra white space"),
        (changed(pieces, precompiled_charsmap=[1, 2]), r"precompiled_charsmap"),
        (changed(pieces, add_bos_token="yes"), r"add_bos_token 'yes'"),
        ({"tokenizer.ggml.model": "gpt2"}, r"has no token list"),
    ]
    for metadata, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            gguf_tokenizer.build(metadata, FILE)
        assert str(FILE) in str(caught.value)
