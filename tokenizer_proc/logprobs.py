"""Log-probabilities of produced tokens in the shapes of the two routes, as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenizer_proc.detokenize import Detokenizer
from wire.messages import TokenLogprobs

LOWEST = -9999.0  # JSON has no minus infinity


class ChatTop(msgspec.Struct):
    """An alternative."""

    token: str
    logprob: float
    bytes: list[int]


class ChatEntry(msgspec.Struct):
    """One token of `logprobs.content`."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTop]


class TextEntry(msgspec.Struct):
    """One token of a completion; the frontend makes the four parallel lists of it."""

    token: str
    token_logprob: float
    top_logprobs: dict[str, float] | None
    text_offset: int


encode = msgspec.json.Encoder().encode


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def chat_entries(detokenizer: Detokenizer, ids: Sequence[int], records: Sequence[TokenLogprobs], top: int) -> bytes:
    """JSON array for produced ids with their records; `top` alternatives each."""

    def entry(number: int, logprob: float) -> ChatTop:
        raw = detokenizer.token_bytes(number)
        return ChatTop(raw.decode("utf-8", "replace"), _finite(logprob), list(raw))

    found = []
    for number, record in zip(ids, records, strict=True):
        own = entry(number, record.logprob)
        alternatives = [
            entry(other, logprob)
            for other, logprob in zip(record.top_ids[:top], record.top_logprobs[:top], strict=True)
        ]
        found.append(ChatEntry(own.token, own.logprob, own.bytes, alternatives))
    return encode(found)


def text_entries(
    detokenizer: Detokenizer,
    ids: Sequence[int],
    records: Sequence[TokenLogprobs],
    top: int,
    offsets: Sequence[int],
) -> bytes:
    """As `chat_entries`; `offsets[i]` is the number of characters of text before id i."""

    def name(number: int) -> str:
        return detokenizer.token_bytes(number).decode("utf-8", "replace")

    found = []
    for number, record, offset in zip(ids, records, offsets, strict=True):
        alternatives: dict[str, float] | None = None
        if top:
            # Two ids may have the same text: the likelier one, which comes first, stays.
            alternatives = {}
            for other, logprob in zip(record.top_ids[:top], record.top_logprobs[:top], strict=True):
                alternatives.setdefault(name(other), _finite(logprob))
            alternatives.setdefault(name(number), _finite(record.logprob))
        found.append(TextEntry(name(number), _finite(record.logprob), alternatives, offset))
    return encode(found)
