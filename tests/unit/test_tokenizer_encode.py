"""The segment cache changes no id, and a conversation's next turn encodes only what is new."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from tests.unit.tokenizer_models import CONTROL, SPECS, with_control
from tests.unit.tokenizer_world import TINY
from tokenizer_proc.encode import CUT_CHARS, Encoder, SegmentCache
from tokenizer_proc.guard import Guard
from tokenizer_proc.model_files import ModelFiles, load_model_files
from tokenizer_proc.render import ChatTemplate

PROSE = (
    "The quick brown fox jumps over the lazy dog, then it's 12 o'clock.\n\tNaïve “quotes” — 한국어 \U0001f680  two  "
)


def files_of(tokenizer: Tokenizer) -> ModelFiles:
    control = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return ModelFiles(tokenizer, tokenizer.to_str(), None, {}, control, [], [])


def ids_of(raw: bytes) -> list[int]:
    return [int(number) for number in np.frombuffer(raw, np.int32)]


@pytest.mark.parametrize("kind", SPECS)
@given(data=st.data())
def test_segments_and_cuts_give_the_tokenizer_s_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = with_control(SPECS[kind](), CONTROL["qwen"], ["<think>"])
    encoder = Encoder(files_of(tokenizer), 100_000)
    pieces = [*CONTROL["qwen"], "<think>", " ", "\n", "a b", "words and ", PROSE, "x" * 9, "user\n", "é", "\u0301"]
    parts = data.draw(st.lists(st.sampled_from(pieces), max_size=12))
    text = "".join(parts) + PROSE * data.draw(st.sampled_from([0, 0, 0, 200]))
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids_of(encoder.chat(text, "")) == expected
    assert ids_of(encoder.chat(text, "")) == expected  # from the cache


def test_a_token_that_swallows_white_space() -> None:
    for flags in ({"rstrip": True}, {"lstrip": True}, {"rstrip": True, "lstrip": True}):
        tokenizer = with_control(SPECS["byte_level"](), ["<|end|>"], (), **flags)
        encoder = Encoder(files_of(tokenizer), 1000)
        assert encoder.segments
        for text in (
            "a <|end|> \n b",
            "<|end|>\u3000b",
            "a\n\n<|end|><|end|> <|end|>",
            " <|end|> ",
            "a\x1c<|end|>\x1fb",
        ):
            assert ids_of(encoder.chat(text, "")) == tokenizer.encode(text, add_special_tokens=False).ids


def test_what_does_not_hold_for_a_tokenizer_is_not_used() -> None:
    # This normalizer strips each segment, but cuts inside would lose spaces.
    stripping = Tokenizer.from_str(SPECS["byte_level"]())
    stripping.normalizer = normalizers.Strip()
    encoder = Encoder(files_of(with_control(stripping.to_str(), CONTROL["qwen"])), 1000)
    assert encoder.segments and not encoder.cuts
    # A token that holds a letter before a space reaches across a cut.
    across = with_control(SPECS["byte_level"](), CONTROL["qwen"])
    across.add_tokens([AddedToken("of the", normalized=False)])
    assert not Encoder(files_of(across), 1000).cuts
    # Tokens that only count between words cannot be found by a split.
    words = with_control(SPECS["byte_level"](), ["<|end|>"], single_word=True)
    encoder = Encoder(files_of(words), 1000)
    assert not encoder.segments
    text = "a<|end|>b <|end|> c"
    assert ids_of(encoder.chat(text, "")) == words.encode(text, add_special_tokens=False).ids


def test_31_a_tokenizer_that_has_a_control_token_s_text_in_its_vocabulary() -> None:
    """Unigram models find `</s>` as a piece of plain text; its parts are encoded instead."""
    spec = json.loads(SPECS["unigram"]())
    spec["model"]["vocab"].append(["</s>", 0.0])
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
    number = tokenizer.token_to_id("</s>")
    encoder = Encoder(files_of(tokenizer), 1000)
    guard = Guard(["</s>"])
    assert number in ids_of(encoder.chat("a</s>", ""))
    text, mark = guard.protect_text("one </s> two</s>")
    assert number not in ids_of(encoder.text(text, mark))
    assert number not in ids_of(encoder.chat(text, mark))


def test_the_cache_keeps_its_bound_and_the_newest() -> None:
    cache = SegmentCache(1000)
    for index in range(50):
        cache.add(f"text {index}", b"1234" * 36)
        cache.find(["text 0"])
    assert cache.tokens == 100 * len(cache) <= 1000
    assert cache.find(["text 0", "text 49", "text 30"])[2] is None
    assert None not in cache.find(["text 0", "text 49"])
    cache.add("huge", b"1234" * 2000)
    assert cache.find(["huge"]) == [None]


def test_a_prompt_s_first_piece_and_the_rest() -> None:
    files = load_model_files(TINY)
    encoder = Encoder(files, 100_000)
    for text in (PROSE, PROSE * 300, "x" * 50_000):
        expected = files.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids_of(encoder.text(text)) == expected
        assert ids_of(encoder.text(text)) == expected
    assert len(encoder.cache) >= 2 and max(map(len, encoder.cache._entries)) < CUT_CHARS + 200


def test_a_next_turn_encodes_only_what_is_new() -> None:
    """128K tokens of conversation and 1K new: 10 ms (asserted with the factor of all times in tests)."""
    files = load_model_files(TINY)
    encoder = Encoder(files, 4_000_000)
    template = ChatTemplate(files.templates, files.special_tokens, files.control)
    source = Path(json.__file__).read_text()
    words = (source * 60)[: 6 * 60_000]
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": words[start : start + 4000]}
        for index, start in enumerate(range(0, len(words), 4000))
    ]
    first = encoder.chat(*template.render(messages, None, None))
    assert len(first) // 4 > 100_000
    best = 1e9
    for turn in range(5):
        messages.append({"role": "user", "content": f"{turn} " + words[turn : turn + 3000]})
        misses = encoder.cache.misses
        started = time.perf_counter()
        encoder.chat(*template.render([dict(message) for message in messages], None, None))
        best = min(best, time.perf_counter() - started)
        assert encoder.cache.misses - misses == 1
    assert best < 0.010 * 5
