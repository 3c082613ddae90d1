"""Ids to text, incrementally: whole characters only, and joined the same as the decode of the whole sequence.

Byte-level and SentencePiece-like decoders are a table from id to bytes, checked at start against the tokenizer's own
decode; any other decoder goes through a window over `tokenizer.decode`. Special tokens have no text.

Bytes that can never become a character are shown as U+FFFD, one for each maximal ill-formed part, at the moment when
that is certain. (For a run of SentencePiece byte tokens that is not valid as a whole, `tokenizer.decode` shows one per
byte, also for characters before the fault; a stream has sent those already.)
"""

from __future__ import annotations

import codecs
import random
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from tokenizer_proc.samples import TEXT_SAMPLES

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"
SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
MAX_HELD_IDS = 8  # the window gives up waiting for a character after this many ids
CHECK_SEQUENCES = 200
CHECK_IDS = 24

utf_8_decode = codecs.utf_8_decode

Piece = Any  # bytes of one id (table), or the id itself (window)


class DecodeState(Protocol):
    """Of one sequence."""

    def feed(self, pieces: Sequence[Piece]) -> str:
        """Text that is certain after these pieces. Feeding all at once or one by one gives the same joined text."""
        ...

    def copy(self) -> DecodeState:
        """A state of its own at the same place."""
        ...


class Detokenizer:
    """`pieces` maps ids to what `DecodeState.feed` takes; `token_bytes` gives any id's own bytes, special or not."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        """`decoder`: the tokenizer's own, as tokenizer.json has it."""
        self._tokenizer = tokenizer
        self._specials = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        names = {number: name for name, number in tokenizer.get_vocab(with_added_tokens=True).items()}
        self._names: list[str | None] = [names.get(number) for number in range(max(names, default=-1) + 1)]
        self._rule = _rule_for(decoder)
        self._table: list[bytes] = []
        self._own: list[bytes] = []
        if self._rule is not None:
            self._own = [b"" if name is None else self._rule.to_bytes(name) for name in self._names]
            self._table = [b"" if number in self._specials else own for number, own in enumerate(self._own)]
            if not self._check():
                self._rule = None
        self.by_table = self._rule is not None

    def cover(self, vocab_size: int) -> None:
        """Make the table as long as the model's vocabulary: ids without a token have no text."""
        missing = vocab_size - len(self._table)
        if self.by_table and missing > 0:
            self._table += [b""] * missing

    def start(self) -> DecodeState:
        if self._rule is not None:
            return TableState(self._rule.strip, self._rule.drop_first)
        return WindowState(self._tokenizer)

    def pieces(self, ids: memoryview | Sequence[int]) -> list[Piece]:
        """One piece per id. Raises IndexError for an id outside the vocabulary."""
        return list(map(self._table.__getitem__, ids)) if self.by_table else list(ids)

    def no_text(self) -> Piece:
        """A piece that adds nothing: takes the place of a stop id."""
        return b"" if self.by_table else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a whole sequence; bytes of an unfinished character at its end are left out."""
        return self.start().feed(self.pieces(ids))

    def token_bytes(self, number: int) -> bytes:
        """Bytes of one token as it stands in the middle of a text; of a special token, its own text."""
        if self.by_table:
            return self._own[number] if number < len(self._own) else b""
        return self._tokenizer.decode([number], skip_special_tokens=False).encode()

    def _check(self) -> bool:
        """Whether the table gives the tokenizer's decode on encoded samples and on random ids."""
        draw = random.Random(0)  # the same sequences at every start
        usable = [number for number, name in enumerate(self._names) if name is not None]
        if self._rule is not None and self._rule.byte_tokens:
            usable = [number for number in usable if not BYTE_TOKEN.fullmatch(self._names[number] or "")]
        rows = [draw.choices(usable, k=CHECK_IDS) for _ in range(CHECK_SEQUENCES)] if usable else []
        rows += [self._tokenizer.encode(sample).ids for sample in TEXT_SAMPLES]
        rule = self._rule
        if rule is None:
            return False
        for row in rows:
            state = TableState(rule.strip, rule.drop_first)
            text = state.feed([self._table[number] for number in row])
            if state.pending:
                text += state.pending.decode("utf-8", "replace")
            if text != self._tokenizer.decode(row, skip_special_tokens=True):
                return False
        return True


class TableState:
    """Bytes of an unfinished character, and what is still to be stripped from the start of the text."""

    __slots__ = ("drop_first", "pending", "strip")

    def __init__(self, strip: int, drop_first: bool) -> None:
        self.pending = b""
        self.strip = strip
        self.drop_first = drop_first

    def feed(self, pieces: Sequence[Piece]) -> str:
        if self.drop_first:
            pieces = self._drop_first(pieces)
        data = b"".join(pieces)
        if self.pending:
            data = self.pending + data
        text, used = utf_8_decode(data, "replace", False)
        rest = data[used:]
        if rest and SURROGATE.match(rest):
            # The decoder waits for the third byte of an encoded surrogate, which is no character whatever comes.
            text, rest = text + REPLACEMENT * len(rest), b""
        self.pending = rest
        return self._stripped(text) if self.strip and text else text

    def copy(self) -> TableState:
        other = TableState(self.strip, self.drop_first)
        other.pending = self.pending
        return other

    def _stripped(self, text: str) -> str:
        size = 0
        while size < self.strip and size < len(text) and text[size] == " ":
            size += 1
        self.strip = self.strip - size if size == len(text) else 0
        return text[size:]

    def _drop_first(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        for index, piece in enumerate(pieces):
            if piece:
                self.drop_first = False
                return [piece.replace(b" ", b""), *pieces[index + 1 :]]
        return pieces


class WindowState:
    """Decodes the ids since the last but one certain border, and shows what they add to those up to the last one."""

    __slots__ = ("_ids", "_read", "_start", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._read = 0

    def feed(self, pieces: Sequence[Piece]) -> str:
        # One by one: what is shown must not depend on how the ids are grouped.
        return "".join([self._feed(number) for number in pieces if number is not None])

    def copy(self) -> WindowState:
        other = WindowState(self._tokenizer)
        other._ids, other._start, other._read = list(self._ids), self._start, self._read
        return other

    def _feed(self, number: int) -> str:
        ids = self._ids
        ids.append(number)
        decode = self._tokenizer.decode
        known = decode(ids[self._start : self._read], skip_special_tokens=True)
        text = decode(ids[self._start :], skip_special_tokens=True)
        waits = text.endswith(REPLACEMENT) and len(ids) - self._read < MAX_HELD_IDS
        if len(text) <= len(known) or waits:
            return ""
        del ids[: self._start]
        self._start, self._read = self._read - self._start, len(ids)
        return text[len(known) :]


class _Rule:
    """How a token's name becomes bytes.

    `strip`: spaces that are taken from the text's start; `drop_first`: the first token loses all of its own.
    """

    def __init__(self, strip: int = 0, drop_first: bool = False, byte_tokens: bool = False) -> None:
        self.strip, self.drop_first, self.byte_tokens = strip, drop_first, byte_tokens
        self.replacements: list[tuple[str, str]] = []

    def to_bytes(self, name: str) -> bytes:
        for old, new in self.replacements:
            name = name.replace(old, new)
        if self.byte_tokens and (found := BYTE_TOKEN.fullmatch(name)):
            return bytes([int(found[1], 16)])
        return name.encode()


class _ByteLevel(_Rule):
    """Each character of a name stands for a byte; a name with any other character stands for itself."""

    def __init__(self) -> None:
        super().__init__()
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]
        self._bytes = {chr(byte): byte for byte in shown}
        self._bytes |= {chr(256 + index): byte for index, byte in enumerate(hidden)}

    def to_bytes(self, name: str) -> bytes:
        try:
            return bytes([self._bytes[character] for character in name])
        except KeyError:
            return name.encode()


def _rule_for(decoder: dict[str, Any] | None) -> _Rule | None:
    """The table's rule for a decoder of tokenizer.json; None when only the tokenizer itself can decode."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevel()
    if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    rule = _Rule(byte_tokens="ByteFallback" in kinds)
    fused = False
    for step in steps:
        match step["type"]:
            case "Replace":
                pattern = step["pattern"].get("String")
                if pattern is None or fused:
                    return None
                rule.replacements.append((pattern, step["content"]))
            case "Metaspace":
                rule.replacements.append((step["replacement"], " "))
                rule.drop_first = step.get("prepend_scheme", "always") != "never"
            case "Strip":
                if not fused or step["content"] != " " or step["stop"] or rule.strip:
                    return None
                rule.strip = step["start"]
            case "Fuse":
                fused = True
    return rule
