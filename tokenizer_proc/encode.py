"""Text to ids, with a cache of encoded segments, so that a conversation's next turn encodes only what is new.

A segment is the text between two control tokens; long segments are cut further where no token can reach across. Both
kinds of borders are checked at start on samples that are meant to break them; what does not hold for a tokenizer is
not used with it. Ids are little-endian int32 bytes everywhere, joined by copies of memory.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from tokenizers import AddedToken, Tokenizer

from tokenizer_proc.guard import any_of
from tokenizer_proc.model_files import ModelFiles
from tokenizer_proc.samples import SEGMENT_SAMPLES, TEXT_SAMPLES

ID_BYTES = 4
CUT_CHARS = 8192
BATCH_SEGMENTS = 32
ENTRY_TOKENS = 64  # what an entry costs beside its ids, in tokens of 8 bytes (text and ids)
# The tokenizer's own view of white space, which tokens with lstrip or rstrip swallow.
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
CROSSING = re.compile(r"[A-Za-z][ \u0120\u2581]")  # a letter before a space, as tokens write it: none may hold it
# Stands before a later segment, so that it is not taken for the start of a text. No client can know it.
ANCHOR = "\ufdd1" + secrets.token_hex(16)


class SegmentCache:
    """LRU from a segment's text to its ids. `capacity` in tokens. Safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.tokens = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, texts: list[str]) -> list[bytes | None]:
        with self._lock:
            found = []
            entries = self._entries
            for text in texts:
                if (ids := entries.get(text)) is not None:
                    entries.move_to_end(text)
                found.append(ids)
            missing = found.count(None)
            self.hits += len(found) - missing
            self.misses += missing
            return found

    def add(self, text: str, ids: bytes) -> None:
        cost = len(ids) // ID_BYTES + ENTRY_TOKENS
        if cost > self._capacity:
            return
        with self._lock:
            if text in self._entries:
                return
            self._entries[text] = ids
            self.tokens += cost
            while self.tokens > self._capacity:
                _, old = self._entries.popitem(last=False)
                self.tokens -= len(old) // ID_BYTES + ENTRY_TOKENS


class Encoder:
    """Encodes rendered chats and bare texts. Methods may run in several threads.

    `segments`: whether segments encoded one by one give the tokenizer's ids; `cuts`: the same for cuts inside.
    `longest`: the context length. A piece of more tokens keeps its number of ids; their values are 0 then.
    """

    def __init__(self, files: ModelFiles, cache_tokens: int) -> None:
        self._whole = files.tokenizer
        self._plain = _plain_tokenizer(files)
        self._control = {text: _pack([number]) for text, number in files.control.items()}
        self._control_ids = np.fromiter(files.control.values(), np.int32, len(files.control))
        self._prefix, self._suffix = _pack(files.prefix_ids), _pack(files.suffix_ids)
        flags = {token.content: token for token in files.tokenizer.get_added_tokens_decoder().values()}
        self._swallows_left = {text for text in files.control if flags[text].lstrip}
        self._swallows_right = {text for text in files.control if flags[text].rstrip}
        self._splitters: dict[str, re.Pattern[str] | None] = {}
        self.cache = SegmentCache(cache_tokens)
        self.longest = 1 << 40
        self._cut_chars = 0
        self.segments = self.cuts = True
        self.segments = not any(flags[text].single_word for text in files.control) and self._check_segments()
        self.cuts = self.segments and self._check_cuts()
        self._cut_chars = CUT_CHARS if self.cuts else 0

    def chat(self, text: str, mark: str) -> bytes:
        """Ids of a rendered chat. Control tokens are found in `text`, except where `mark` breaks them."""
        if not self.segments and not mark:
            return self._raw(self._whole, [text])[0]
        splitter = self._splitter(mark)
        parts = splitter.split(text) if splitter is not None else [text]
        out: list[bytes] = [b""] * len(parts)
        later: list[tuple[int, str]] = []
        for index in range(1, len(parts), 2):
            out[index] = self._control[parts[index]]
        for index in range(0, len(parts), 2):
            if piece := self._trimmed(parts, index):
                later.append((index, piece))
        if later and later[0][0] == 0:
            out[0] = self._first(later.pop(0)[1], mark)
        for (index, _), ids in zip(later, self._encode([piece for _, piece in later], mark), strict=True):
            out[index] = ids
        return b"".join(out)

    def text(self, text: str, mark: str = "") -> bytes:
        """Ids of a bare prompt, with what the tokenizer puts around a text; nothing in it is a control token."""
        return b"".join((self._prefix, self._first(text, mark) if text else b"", self._suffix))

    def _trimmed(self, parts: list[str], index: int) -> str:
        """A segment without the white space that its neighbours swallow."""
        piece = parts[index]
        if self._swallows_right and index > 0 and parts[index - 1] in self._swallows_right:
            piece = piece.lstrip(WHITE_SPACE)
        if self._swallows_left and index + 1 < len(parts) and parts[index + 1] in self._swallows_left:
            piece = piece.rstrip(WHITE_SPACE)
        return piece

    def _splitter(self, mark: str) -> re.Pattern[str] | None:
        if not self._control:
            return None
        if mark not in self._splitters:
            # A token of one character is broken by the mark behind it.
            single = f"(?!{mark})" if mark else ""
            self._splitters[mark] = re.compile(f"({any_of(self._control, single)})")
        return self._splitters[mark]

    def _first(self, text: str, mark: str) -> bytes:
        """Ids of the segment at a text's start: only its first piece, which is not cached, may be special."""
        head, *tail = self._cut(text)
        first = self._marked(head, mark, anchor="") if mark and mark in head else self._raw(self._plain, [head])[0]
        return first if not tail else b"".join((first, *self._encode(tail, mark)))

    def _cut(self, text: str) -> list[str]:
        size = self._cut_chars
        if not size or len(text) <= size:
            return [text]
        pieces, start = [], 0
        while (found := CUT.search(text, start + size)) is not None:
            pieces.append(text[start : found.end()])
            start = found.end()
        pieces.append(text[start:])
        return pieces

    def _encode(self, texts: list[str], mark: str) -> list[bytes]:
        """Ids of each of these later segments."""
        if not self._cut_chars or all(len(text) <= self._cut_chars for text in texts):
            return self._encode_pieces(texts, mark)
        cut = [self._cut(text) for text in texts]
        found = iter(self._encode_pieces([piece for pieces in cut for piece in pieces], mark))
        return [b"".join([next(found) for _ in pieces]) for pieces in cut]

    def _encode_pieces(self, texts: list[str], mark: str) -> list[bytes]:
        found = self.cache.find(texts)
        missing = [index for index, ids in enumerate(found) if ids is None]
        plain = [index for index in missing if not mark or mark not in texts[index]]
        for start in range(0, len(plain), BATCH_SEGMENTS):
            batch = plain[start : start + BATCH_SEGMENTS]
            for index, ids in zip(batch, self._later([texts[index] for index in batch]), strict=True):
                found[index] = ids
                if len(ids) <= ID_BYTES * self.longest:
                    self.cache.add(texts[index], ids)
        for index in missing:
            if found[index] is None:
                found[index] = self._marked(texts[index], mark, ANCHOR)
        return [ids for ids in found if ids is not None]

    def _marked(self, text: str, mark: str, anchor: str) -> bytes:
        """Ids of a segment with marks: the text without them, and never a control token."""
        bare = text.replace(mark, "")
        ids = self._later([bare])[0] if anchor else self._raw(self._plain, [bare])[0]
        if len(ids) > ID_BYTES * self.longest or not np.isin(np.frombuffer(ids, np.int32), self._control_ids).any():
            return ids
        # This tokenizer finds the token's text in its plain vocabulary too: the broken parts are encoded one by one.
        head, *tail = [part for part in text.split(mark) if part]
        first = self._later([head])[0] if anchor else self._raw(self._plain, [head])[0]
        return b"".join((first, *self._later(tail)))

    def _later(self, texts: list[str]) -> list[bytes]:
        return [ids[ID_BYTES:] for ids in self._raw(self._plain, [ANCHOR + text for text in texts])]

    def _raw(self, tokenizer: Tokenizer, texts: list[str]) -> list[bytes]:
        # Of a piece that fits into no context only the number of ids matters: it will be refused by that.
        return [
            _pack(found.ids) if len(found) <= self.longest else bytes(ID_BYTES * len(found))
            for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    # --- checks at start ------------------------------------------------------------------------------------------

    def _check_segments(self) -> bool:
        """Whether segments one by one give what the tokenizer gives for the whole."""
        controls = list(self._control)[:8] or [""]
        for number, sample in enumerate(SEGMENT_SAMPLES):
            control = controls[number % len(controls)]
            other = controls[(number + 1) % len(controls)]
            for text in (f"{control}{sample}", f"{sample}{control}{sample}{other}", f"{control}{sample}{other}\n"):
                if self.chat(text, "") != self._raw(self._whole, [text])[0]:
                    return False
        return True

    def _check_cuts(self) -> bool:
        """Whether text may be cut between a letter and a space.

        No token holds a letter before a space, so no merge and no piece reaches across; and samples cut very finely
        give the same ids, so no normalizer or pre-tokenizer looks across either.
        """
        names = "\n".join(self._whole.get_vocab(with_added_tokens=True))
        if CROSSING.search(names):
            return False
        self._cut_chars = 24
        same = all(
            self._first(sample, "") == self._raw(self._plain, [sample])[0]
            and self._encode([sample], "")[0] == self._later([sample])[0]
            for sample in TEXT_SAMPLES
        )
        self._cut_chars = 0
        self.cache = SegmentCache(self.cache._capacity)
        return same


def _plain_tokenizer(files: ModelFiles) -> Tokenizer:
    """The same tokenizer, for which control tokens are ordinary text, with the anchor as its last token."""
    source, added = files.source, files.tokenizer.get_added_tokens_decoder().values()
    if any(token.content in files.control and not token.special for token in added):
        spec = json.loads(source)
        for token in spec["added_tokens"]:
            token["special"] |= token["content"] in files.control
        source = json.dumps(spec)
    tokenizer = Tokenizer.from_str(source)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    files.tokenizer.no_truncation()
    files.tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    tokenizer.add_tokens([AddedToken(ANCHOR, normalized=False, special=False)])
    return tokenizer


def _pack(ids: Iterable[int]) -> bytes:
    return np.array(ids if isinstance(ids, list) else list(ids), dtype="<i4").tobytes()
