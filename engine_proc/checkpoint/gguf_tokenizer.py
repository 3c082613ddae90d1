"""Builds tokenizer.json and tokenizer_config.json from the tokenizer that a GGUF file carries in its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

Json = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_TYPES = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
SPACE = "\u2581"  # SentencePiece writes a space so
_BYTES = [f"<0x{value:02X}>" for value in range(256)]

# A control token that ends a turn ends generation too, if the file's own chat template writes it.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_text|>")


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _words(digits: str) -> str:
    """The pattern of Llama 3 and Qwen 2, which differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """steps: of the tokenizer.json sequence. whole_words: a word that is a token is not merged. bos: by default."""

    steps: tuple[Json, ...]
    whole_words: bool = False
    nfc: bool = False
    bos: bool = False


_LLAMA_BPE = _PreTokenizer((_split(_words(r"\p{N}{1,3}")), _byte_level(False)), whole_words=True, bos=True)
_QWEN2 = _PreTokenizer((_split(_words(r"\p{N}")), _byte_level(False)), nfc=True)

# By tokenizer.ggml.pre. "default" is the name that files get whose origin was not known; it means these four splits.
PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "smollm": _PreTokenizer(({"type": "Digits", "individual_digits": True}, _byte_level(True))),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _PreTokenizer((_byte_level(True),)),
    "default": _PreTokenizer(
        (
            _split(r"[\p{P}\$\+<=>\^~\|]+"),
            _split(_GPT2_PATTERN),
            _split(r"\p{N}+"),
            _split(r"[0-9][0-9][0-9]"),
            _byte_level(False),
        )
    ),
}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the folder gets, and the ids that end generation (ascending)."""

    tokenizer: Json
    config: Json
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None


class _Source:
    """The tokenizer entries of the metadata, checked."""

    def __init__(self, metadata: Json, path: Path) -> None:
        self.path = path
        self._metadata = metadata
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise self.refuse("has no token list")
        self.tokens: list[str] = list(tokens)
        self.ids = {token: index for index, token in enumerate(tokens)}
        if len(self.ids) != len(tokens):
            twice = next(token for index, token in enumerate(tokens) if self.ids[token] != index)
            raise self.refuse(f"holds the token {twice!r} twice")
        types = self.get("token_type")
        self.types: list[int] = [NORMAL] * len(tokens) if types is None else [int(kind) for kind in types]
        if len(self.types) != len(tokens):
            raise self.refuse(f"has {len(tokens)} tokens but {len(self.types)} token types")
        strange = next((kind for kind in self.types if kind not in _TYPES), None)
        if strange is not None:
            raise self.refuse(f"has a token of type {strange}; accepted are {', '.join(map(str, _TYPES))}")

    def refuse(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}: the tokenizer {problem}")

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(f"has {name} {value!r}, which is neither true nor false")
        return value

    def id(self, name: str) -> int | None:
        """A special token's id; None if the file names none."""
        value = self.get(f"{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.refuse(f"has {name}_token_id {value!r}, outside its {len(self.tokens)} tokens")
        return value

    def template(self) -> str | None:
        value = self._metadata.get("tokenizer.chat_template")
        if value is not None and not isinstance(value, str):
            raise self.refuse("has a chat template that is not a string")
        return value

    def rename(self, index: int, token: str) -> None:
        """Gives a token another spelling."""
        if token == self.tokens[index]:
            return
        if token in self.ids:
            raise self.refuse(f"holds the token {token!r} twice")
        del self.ids[self.tokens[index]]
        self.tokens[index] = token
        self.ids[token] = index

    def of_type(self, *kinds: int) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in kinds]


def _added(source: _Source, user_defined_normalised: bool) -> list[Json]:
    """Tokens found in a text before anything else: control tokens as special ones, user-defined ones as plain text."""
    return [
        {
            "id": index,
            "content": source.tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": user_defined_normalised and source.types[index] == USER_DEFINED,
            "special": source.types[index] != USER_DEFINED,
        }
        for index in source.of_type(CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _post_processor(source: _Source, bos: bool, eos: bool) -> Json | None:
    """Puts bos and eos around a text encoded with special tokens; None if neither is wanted."""
    before = [index for index in [source.id("bos")] if bos and index is not None]
    after = [index for index in [source.id("eos")] if eos and index is not None]
    if (bos and not before) or (eos and not after):
        raise source.refuse("adds bos or eos but does not say which token that is")
    if not before and not after:
        return None

    def around(name: str, type_id: int) -> list[Json]:
        def special(ids: list[int]) -> list[Json]:
            return [{"SpecialToken": {"id": source.tokens[index], "type_id": type_id}} for index in ids]

        return [*special(before), {"Sequence": {"id": name, "type_id": type_id}}, *special(after)]

    used = {source.tokens[index]: index for index in before + after}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()},
    }


def _byte_pair(source: _Source) -> tuple[Json, bool]:
    """Byte-level BPE with merges; also whether bos is added by default."""
    name = source.get("pre")
    if name not in PRE_TOKENIZERS:
        known = "is missing" if name is None else f"{name!r} is not known"
        raise source.refuse(
            f"needs a pre-tokenizer (tokenizer.ggml.pre), which {known}; accepted are {', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    merges = source.get("merges")
    if not isinstance(merges, list):
        raise source.refuse("has no merges")
    pairs = [merge.split(" ") for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or pair[0] + pair[1] not in source.ids:
            raise source.refuse(f"has the merge {' '.join(pair)!r}, which does not make a token of two")
    sequence = list(pre.steps)
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": sequence[0] if len(sequence) == 1 else {"type": "Sequence", "pretokenizers": sequence},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "added_tokens": _added(source, user_defined_normalised=False),
        "model": _model(source, pairs, unknown=None, byte_fallback=False, whole_words=pre.whole_words),
    }, pre.bos


def _model(
    source: _Source, merges: list[list[str]], unknown: str | None, byte_fallback: bool, whole_words: bool
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": whole_words,
        "vocab": source.ids,
        "merges": merges,
    }


def scored_merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Merges for pieces that SentencePiece joins by score: any two pieces that make a piece, best joined score first.

    tokens, scores: of the normal pieces, in id order. Ways to make the same piece follow the order of transformers'
    own conversion of such vocabularies, the reference for these models: the longer left part first.
    """
    known = set(tokens)
    ranked = [
        (-score, -cut, cut - len(token), token)
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    ranked.sort(key=lambda way: way[:3])
    return [[token[:-left], token[-left:]] for _, left, _, token in ranked]


def _sentence_piece(source: _Source) -> tuple[Json, bool]:
    """SentencePiece BPE with scores; also that bos is added by default."""
    scores = source.get("scores")
    if scores is None or len(scores) != len(source.tokens):
        raise source.refuse("has no score for each token")
    if source.flag("remove_extra_whitespaces", False):
        raise source.refuse("removes extra white space, which is not done here")
    if len(source.get("precompiled_charsmap", ())):
        raise source.refuse("has a table of character replacements (precompiled_charsmap), which is not applied here")
    prefix = source.flag("add_space_prefix", True)
    for index in source.of_type(USER_DEFINED):
        # Such a piece is matched against text whose spaces are written as U+2581 already.
        piece = source.tokens[index].replace(" ", SPACE)
        if prefix and SPACE in piece:
            raise source.refuse(f"has the user-defined piece {piece!r} together with add_space_prefix")
        source.rename(index, piece)
    bytes_there = [source.tokens[index] for index in source.of_type(BYTE)]
    if bytes_there and sorted(bytes_there) != _BYTES:
        raise source.refuse(f"has {len(bytes_there)} byte tokens that are not <0x00> to <0xFF>")
    unknown = source.id("unknown")
    normal = source.of_type(NORMAL)
    merges = scored_merges([source.tokens[i] for i in normal], [float(scores[i]) for i in normal])
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        spaces = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    name = None if unknown is None else source.tokens[unknown]
    return {
        "normalizer": spaces,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "added_tokens": _added(source, user_defined_normalised=not prefix),
        "model": _model(source, merges, unknown=name, byte_fallback=bool(bytes_there), whole_words=False),
    }, True


_KINDS: dict[str, Callable[[_Source], tuple[Json, bool]]] = {"gpt2": _byte_pair, "llama": _sentence_piece}


def _eos_ids(source: _Source, template: str | None) -> tuple[int, ...]:
    found = {source.id("eos"), source.id("eot"), source.id("eom")}
    for token in _TURN_ENDS:
        index = source.ids.get(token)
        if index is not None and source.types[index] == CONTROL and template and token in template:
            found.add(index)
    return tuple(sorted(index for index in found if index is not None))


def build(metadata: Json, path: Path) -> TokenizerFiles:
    """The files for the tokenizer in `metadata` (of the file `path`). ValueError names what is missing or not known."""
    source = _Source(metadata, path)
    kind = source.get("model")
    if kind not in _KINDS:
        raise source.refuse(f"is of the kind {kind!r} (tokenizer.ggml.model); accepted are {', '.join(_KINDS)}")
    parts, bos_by_default = _KINDS[kind](source)
    bos, eos = source.flag("add_bos_token", bos_by_default), source.flag("add_eos_token", False)
    whole: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": parts["added_tokens"],
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(source, bos, eos),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }
    _check(whole, source)
    template = source.template()
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bos,
        "add_eos_token": eos,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = source.id(theirs)
        if index is not None:
            config[f"{ours}_token"] = source.tokens[index]
    if template is not None:
        config["chat_template"] = template
    return TokenizerFiles(whole, config, source.id("bos"), _eos_ids(source, template), source.id("padding"))


def _check(whole: Json, source: _Source) -> None:
    """The library must take the file, and give every token the id that the model knows it by."""
    try:
        made = Tokenizer.from_str(json.dumps(whole))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for a file it refuses
        raise source.refuse(f"cannot be built: {error}") from None
    if made.get_vocab_size(with_added_tokens=True) != len(source.tokens):
        raise source.refuse("does not keep its ids: a special token is not in its vocabulary")
