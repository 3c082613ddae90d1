"""One sequence on its way out: produced ids → text → stop strings → deltas, the same however its ids are grouped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizer_proc.detokenize import DecodeState, Detokenizer
from tokenizer_proc.logprobs import chat_entries, text_entries
from tokenizer_proc.stops import StopMatcher
from wire.messages import Finished, SequenceLogprobs, TextDelta, TokenLogprobs, Usage

if TYPE_CHECKING:
    from tokenizer_proc.requests import Request

REASONS = {"stop": "stop", "length": "length"}


class Sequence:
    """State of one choice. `take` and `end` collect what comes; `delta` makes one delta of all of it.

    `received` counts ids that came, `tokens` those that count (after a stop string: up to the id that completed it).
    """

    __slots__ = (
        "accepted",
        "attempt",
        "dirty",
        "end",
        "ids",
        "matcher",
        "offset",
        "pieces",
        "received",
        "records",
        "request",
        "sid",
        "state",
        "stopped_at",
        "text_chars",
        "tokens",
    )

    def __init__(self, sid: int, request: Request, state: DecodeState, matcher: StopMatcher | None) -> None:
        self.sid = sid
        self.request = request
        self.state = state
        self.matcher = matcher
        self.attempt = 0
        self.accepted = False
        self.dirty = False
        self.pieces: list[Any] = []
        self.ids: list[int] = []  # kept only for log-probabilities
        self.records: list[TokenLogprobs] = []
        self.received = 0
        self.tokens = 0
        self.offset = 0  # characters sent
        self.text_chars = 0  # characters decoded; counted only for log-probabilities
        self.end: Finished | None = None
        self.stopped_at = 0.0  # when a stop string matched (monotonic seconds); 0 = none

    def take_logprobs(self, found: SequenceLogprobs) -> bool:
        """Keep the records of ids that came in the same step. False when they do not fit to the ids."""
        if self.stopped_at:
            return True
        skip = self.tokens + len(self.records) - found.offset
        if skip < 0:
            return False
        self.records += found.tokens[skip:]
        return True

    def delta(self, detokenizer: Detokenizer, now: float) -> TextDelta | None:
        """The delta of all that came since the last one; None when there is nothing to say.

        With a match of a stop string, `stopped_at` is set and the delta has no finish reason yet: the engine's last
        word brings the usage (see `requests`).
        """
        pieces, end = self.pieces, self.end
        if end is not None and end.stop_id >= 0 and pieces:
            pieces[-1] = detokenizer.no_text()  # the id that ended it counts and is not shown
        logprobs = b""
        if self.matcher is None and self.request.logprobs < 0:
            text = self.state.feed(pieces)
            self.tokens = self.received
        else:
            text, logprobs = self._matched(detokenizer, pieces, now)
        self.pieces = []
        if end is not None and not self.stopped_at:
            return self._last(text, logprobs, end)
        if not text and not logprobs:
            return None
        offset = self.offset
        self.offset = offset + len(text)
        return TextDelta(self.sid, offset, text, self.tokens, "", None, "", logprobs)

    def _last(self, text: str, logprobs: bytes, end: Finished) -> TextDelta:
        if end.reason not in REASONS:
            code = end.code or ("request_aborted" if end.reason == "abort" else "internal_error")
            return TextDelta(self.sid, self.offset, "", self.tokens, "", None, code)
        if self.matcher is not None:
            text += self.matcher.rest()
        if not text and not self.offset and self.tokens and self.request.ignore_eos:
            text = "\ufffd"  # a bench that asks for tokens, whatever they are, must see that they came
        delta = TextDelta(
            self.sid, self.offset, text, end.completion_tokens, REASONS[end.reason], end.usage, "", logprobs
        )
        self.offset += len(text)
        return delta

    def stopped(self) -> TextDelta:
        """The last delta after a stop string matched; usage from the engine's last word, if that has come."""
        usage = Usage(0) if self.end is None else self.end.usage
        if not usage.prompt_tokens:  # the engine's last word did not come, or came from a failure
            usage = Usage(self.request.prompt_tokens_of(self.sid))
        return TextDelta(self.sid, self.offset, "", self.tokens, "stop", usage)

    def _matched(self, detokenizer: Detokenizer, pieces: list[Any], now: float) -> tuple[str, bytes]:
        """Decode with stop strings or log-probabilities: what belongs to which id matters here."""
        request, first = self.request, self.tokens
        if self.stopped_at:
            return "", b""
        one_by_one = request.logprobs >= 0 or first < request.min_tokens
        groups = [[piece] for piece in pieces] if one_by_one else [pieces]
        shown: list[str] = []
        offsets: list[int] = []
        for group in groups:
            before = self.state if len(group) == 1 else self.state.copy()
            offsets.append(self.text_chars)
            text = self.state.feed(group)
            self.text_chars += len(text)
            if self.matcher is None or self.tokens + len(group) <= request.min_tokens:
                shown.append(text)  # stop strings count from min_tokens on
                self.tokens += len(group)
                continue
            shown.append(self.matcher.feed(text))
            if not self.matcher.matched:
                self.tokens += len(group)
                continue
            self.tokens += _completing(before, group, self.matcher.matched_at)
            self.stopped_at = now
            break
        return "".join(shown), self._entries(detokenizer, self.tokens - first, offsets)

    def _entries(self, detokenizer: Detokenizer, count: int, offsets: list[int]) -> bytes:
        request = self.request
        if request.logprobs < 0 or not count:
            return b""
        ids, records = self.ids[:count], self.records[:count]
        del self.ids[:count], self.records[:count]
        if request.chat:
            return chat_entries(detokenizer, ids, records, request.logprobs)
        return text_entries(detokenizer, ids, records, request.logprobs, offsets[:count])


def _completing(state: DecodeState, pieces: list[Any], characters: int) -> int:
    """How many of the pieces it takes until `characters` characters of their text are there."""
    if len(pieces) == 1:
        return 1
    for count, piece in enumerate(pieces, 1):
        characters -= len(state.feed([piece]))
        if characters <= 0:
            return count
    return len(pieces)
