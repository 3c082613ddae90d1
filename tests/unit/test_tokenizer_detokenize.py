"""Joined deltas are the decode of the whole, in any grouping; no delta ends inside a character (26, 27)."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.unit.tokenizer_models import CONTROL, SPECS, with_control, wordpiece
from tests.unit.tokenizer_world import TINY
from tokenizer_proc.detokenize import Detokenizer, TableState


def detokenizer_of(tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(tokenizer, json.loads(tokenizer.to_str())["decoder"])


KINDS = {kind: with_control(spec(), CONTROL["qwen"], ["<think>", "<|plain|>"]) for kind, spec in SPECS.items()}
KINDS["tiny"] = Tokenizer.from_file(str(TINY / "tokenizer.json"))
KINDS["wordpiece"] = Tokenizer.from_str(wordpiece())
TABLES = {kind: detokenizer_of(tokenizer) for kind, tokenizer in KINDS.items()}
CHARACTERS = [
    "a", " ", "  ", "the ", "\n", "é", "e\u0301", "€", "한", "ب", "\u0915\u094d\u0937", "\U0001f680", "\U00012000",
    "\U0001f468\u200d\U0001f469", "\U0001f1f3\U0001f1f4", "<|im_end|>", "<think>", "\u2581", "\u0120", "word ",
]  # fmt: skip

texts = st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=16).map("".join)
groupings = st.lists(st.integers(1, 7), min_size=1, max_size=8)


def grouped(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Deltas for ids in groups of these sizes, again and again."""
    state, deltas, start, turn = detokenizer.start(), [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(state.feed(detokenizer.pieces(ids[start : start + size])))
        start, turn = start + size, turn + 1
    return deltas


@pytest.mark.parametrize("kind", TABLES)
def test_the_table_stands_for_every_decoder_it_can_stand_for(kind: str) -> None:
    assert TABLES[kind].by_table == (kind != "wordpiece")


@pytest.mark.parametrize("kind", [kind for kind in TABLES if kind != "wordpiece"])
@given(text=texts, sizes=groupings)
def test_26_encoded_text_in_any_grouping(kind: str, text: str, sizes: list[int]) -> None:
    ids = KINDS[kind].encode(text, add_special_tokens=False).ids
    whole = KINDS[kind].decode(ids, skip_special_tokens=True)
    deltas = grouped(TABLES[kind], ids, sizes)
    assert "".join(deltas) == whole
    assert "\ufffd" in whole or not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("kind", ["tiny", "byte_level", "unigram"])
@given(data=st.data(), sizes=groupings)
def test_26_any_ids_in_any_grouping(kind: str, data: st.DataObject, sizes: list[int]) -> None:
    """Also ids whose bytes are no text: U+FFFD where the decode has it, and an unfinished end left out."""
    size = KINDS[kind].get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1) | st.integers(100, 260), max_size=30))
    whole = KINDS[kind].decode(ids, skip_special_tokens=True)
    joined = "".join(grouped(TABLES[kind], ids, sizes))
    assert joined == whole or joined == whole.removesuffix("\ufffd")
    assert joined == TABLES[kind].decode(ids)


@pytest.mark.parametrize("kind", ["legacy", "first", "always", "never"])
@given(data=st.data(), sizes=groupings)
def test_26_any_ids_with_byte_fallback(kind: str, data: st.DataObject, sizes: list[int]) -> None:
    size = KINDS[kind].get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    joined = "".join(grouped(TABLES[kind], ids, sizes))
    assert joined == TABLES[kind].decode(ids)
    whole = KINDS[kind].decode(ids, skip_special_tokens=True)
    if "\ufffd" not in whole:
        assert joined == whole


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=24), sizes=groupings)
def test_26_any_text_through_the_tiny_model(text: str, sizes: list[int]) -> None:
    ids = KINDS["tiny"].encode(text, add_special_tokens=False).ids
    deltas = grouped(TABLES["tiny"], ids, sizes)
    assert "".join(deltas) == KINDS["tiny"].decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


@given(sizes=groupings, text=st.sampled_from(["the quick brown fox", "of course it isn't", "words, and more words."]))
def test_26_a_decoder_without_a_table(sizes: list[int], text: str) -> None:
    ids = KINDS["wordpiece"].encode(text).ids
    assert "".join(grouped(TABLES["wordpiece"], ids, sizes)) == KINDS["wordpiece"].decode(ids)


def test_26_a_character_comes_with_its_last_byte_and_not_before() -> None:
    ids = KINDS["tiny"].encode("\U00012000!").ids
    assert grouped(TABLES["tiny"], ids, [1]) == ["", "", "", "\U00012000", "!"]


def test_27_bytes_that_can_become_no_character_are_shown_at_once() -> None:
    ids = KINDS["tiny"].encode("\U00012000").ids
    assert grouped(TABLES["tiny"], [ids[0], *KINDS["tiny"].encode("a").ids], [1]) == ["", "\ufffda"]
    assert grouped(TABLES["tiny"], [ids[1], ids[0]], [1]) == ["\ufffd", ""]


def test_27_only_bytes_that_can_still_become_a_character_are_held() -> None:
    """Every start of up to three bytes: held exactly when it begins some character, else shown as the decode has it."""
    encoded = [chr(code).encode() for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    starts = {character[:size] for character in encoded for size in range(1, len(character))}
    lead = [bytes([byte]) for byte in range(0xC0, 0x100)]
    second = [first + bytes([byte]) for first in lead for byte in range(0x80, 0xC0)]
    third = [
        first + bytes([byte]) for first in second if first[0] >= 0xE0 for byte in (0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF)
    ]
    for data in [*lead, *second, *third]:
        for pieces in ([data], [data[index : index + 1] for index in range(len(data))]):
            state = TableState(0, False)
            text = "".join(state.feed([piece]) for piece in pieces)
            whole = data.decode("utf-8", "replace")
            if state.pending:
                assert state.pending in starts, data
                assert text == whole.removesuffix("\ufffd"), data
            else:
                assert text == whole, data


@pytest.mark.parametrize("kind", ["tiny", "byte_level", "unigram"])
def test_26_many_random_ids(kind: str) -> None:
    draw, size = random.Random(26), KINDS[kind].get_vocab_size()
    for _ in range(6000):
        ids = [draw.choice([draw.randrange(size), draw.randrange(3, 259)]) for _ in range(draw.randint(0, 12))]
        whole = KINDS[kind].decode(ids, skip_special_tokens=True)
        joined = "".join(grouped(TABLES[kind], ids, [draw.randint(1, 4)]))
        assert joined in (whole, whole.removesuffix("\ufffd")), ids


def test_26_spaces_at_the_start_are_stripped_once_in_any_grouping() -> None:
    for pieces, text in (
        ([b" ", b" ", b" a"], " a"),
        ([b"", b" a", b" b"], "a b"),
        ([b"   "], " "),
        ([b"a", b" "], "a "),
    ):
        for size in (1, 2, 3):
            state = TableState(2, False)
            groups = [pieces[start : start + size] for start in range(0, len(pieces), size)]
            assert "".join(state.feed(group) for group in groups) == text


def test_ids_without_a_token_have_no_text() -> None:
    detokenizer = detokenizer_of(KINDS["tiny"])
    with pytest.raises(IndexError):
        detokenizer.pieces([2050])
    detokenizer.cover(2051)
    assert detokenizer.decode([2050]) == ""
    assert detokenizer.token_bytes(2050) == b""


def test_a_special_token_has_bytes_of_its_own_and_no_text() -> None:
    assert TABLES["tiny"].token_bytes(2) == b"<|im_end|>"
    assert TABLES["tiny"].decode([2]) == ""
    marks = json.loads((TINY / "tokenizer.json").read_text())["added_tokens"]
    plain = [mark for mark in marks if not mark["special"]]
    assert plain and all(TABLES["tiny"].decode([mark["id"]]) == mark["content"] for mark in plain)
