"""A model that computes nothing: its next id is a fixed function of the prompt and the position, or a script.

It takes the place of the runner, so that everything around the model can be tested and measured as it is.
"counter" walks through the vocabulary's plain words, from a place that the prompt decides; "echo" repeats the prompt
and ends. Per request, test hooks may replace that by a script, ask for several ids a step, and slow the steps down.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_proc.cache_spec import CacheSpec
from engine_proc.checkpoint.folder import read
from engine_proc.plan import Further, Logprobs, Row, SlotState, StepPlan, StepResult

MODELS = ("counter", "echo")
WORD = re.compile(r"[ \u0120\u2581]?[A-Za-z]+")  # byte-level and piece vocabularies write a leading space so
STRIDE = 7_919  # prime: the counter's walk visits every word
MOST_STEP_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class MockModel:
    """What a mock engine knows of its model. words: int32 ids that decode to plain text."""

    digest: str
    spec: CacheSpec
    vocab_size: int
    context_length: int
    eos_ids: list[int]
    words: npt.NDArray[np.int32]


def read_model(folder: Path, block_tokens: int) -> MockModel:
    """From a model folder; no weights are needed. ValueError names what is missing or wrong."""
    facts = read(folder, folder.name, weights=False)
    eos_ids = list(facts.eos_ids)
    words = _words(folder / "tokenizer.json", facts.vocab_size, set(eos_ids))
    spec = CacheSpec(1, block_tokens, (4 * block_tokens,), f"mock/{block_tokens}")
    digest = hashlib.sha256(b"mock " + (folder / "config.json").read_bytes()).hexdigest()
    return MockModel(digest, spec, facts.vocab_size, facts.context_length, eos_ids, words)


def _words(path: Path, vocab_size: int, left_out: set[int]) -> npt.NDArray[np.int32]:
    """Ids of plain words in a tokenizer.json: int32, ascending."""
    try:
        tokenizer = json.loads(path.read_text("utf-8"))
        vocab, added = tokenizer["model"]["vocab"], {item["id"] for item in tokenizer.get("added_tokens", [])}
        pairs = vocab.items() if isinstance(vocab, dict) else ((item[0], number) for number, item in enumerate(vocab))
        found = sorted(
            number
            for token, number in pairs
            if number < vocab_size and number not in added and number not in left_out and WORD.fullmatch(token)
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} has no vocabulary that can be read: {type(error).__name__}") from None
    if len(found) < 2:
        raise ValueError(f"{path}: the vocabulary has no plain words that a mock engine could say")
    return np.array(found, np.int32)


@dataclass(slots=True)
class _Special:
    """A slot that is more than a counter."""

    script: npt.NDArray[np.int32] | None  # ids by number of the produced id; then EOS
    width: int  # ids a step
    logprobs: int
    prompt_tokens: int
    max_tokens: int
    banned: frozenset[int]
    stops: frozenset[int]
    min_position: int


class MockPending:
    """A step whose ids are known; `result` returns when its time has passed."""

    def __init__(self, found: StepResult, due: float) -> None:
        self._found, self._due = found, due

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return time.monotonic() >= self._due

    def result(self) -> StepResult:
        """Waits until the step has taken its time."""
        if self._due and (left := self._due - time.monotonic()) > 0:
            time.sleep(left)
        return self._found


class MockRunner:
    """The runner's interface without a device. Slots with neither script nor wishes cost a few array operations."""

    def __init__(self, model: MockModel, max_running: int, kind: str = "counter", step_ms: float = 0.0) -> None:
        """step_ms: least time from the end of one step to the end of the next."""
        if kind not in MODELS:
            raise ValueError(f"unknown mock model {kind!r}; accepted are {', '.join(MODELS)}")
        self._model, self._kind, self._step_ms = model, kind, step_ms
        self._seeds = np.zeros(max_running, np.int64)
        self._special: dict[int, _Special] = {}
        self._paces: dict[int, float] = {}
        self._open: set[int] = set()
        self._due = 0.0

    def open_slot(self, slot: int, state: SlotState) -> None:
        """Raises ValueError for hooks that make no sense, RuntimeError if the slot is open."""
        if slot in self._open:
            raise RuntimeError(f"slot {slot} is open already")
        params = state.params
        hooks = params.hooks or {}
        script = self._script(hooks, state)
        width, pace = _number(hooks, "tokens_per_step", 1), _number(hooks, "step_ms", 0)
        self._seeds[slot] = zlib.crc32(state.prompt_ids.tobytes())
        if script is not None or width > 1 or params.logprobs >= 0:
            banned, stops = frozenset(state.banned_ids), frozenset(state.stop_ids)
            self._special[slot] = _Special(
                script,
                int(width),
                params.logprobs,
                len(state.prompt_ids),
                params.max_tokens,
                banned,
                stops,
                state.min_position,
            )
        if pace:
            self._paces[slot] = pace
        self._open.add(slot)

    def _script(self, hooks: dict[str, Any], state: SlotState) -> npt.NDArray[np.int32] | None:
        ids = hooks.get("script")
        if ids is not None:
            good = isinstance(ids, list) and all(
                type(item) is int and 0 <= item < self._model.vocab_size for item in ids
            )
            if not good:
                raise ValueError("the hook script must be a list of token ids")
            return np.array(ids, np.int32)
        return state.prompt_ids if hooks.get("echo") or self._kind == "echo" else None

    def close_slot(self, slot: int) -> None:
        """RuntimeError if the slot is not open."""
        if slot not in self._open:
            raise RuntimeError(f"slot {slot} is not open")
        self._open.remove(slot)
        self._special.pop(slot, None)
        self._paces.pop(slot, None)

    def launch(self, plan: StepPlan) -> MockPending:
        """The ids of a step, at once."""
        rows = [row for row in plan.rows if row.sample]
        slots = np.array([row.slot for row in rows], np.int64)
        positions = np.array([row.start + row.count for row in rows], np.int64)
        words = self._model.words
        ids = words[(self._seeds[slots] + positions * STRIDE) % len(words)]
        found = StepResult(ids, np.ones(len(rows), np.bool_))
        if self._special:
            for index, row in enumerate(rows):
                if (special := self._special.get(row.slot)) is not None:
                    self._fill(found, index, row, special)
        for index, row in enumerate(rows):
            if row.nan_logits:
                found.finite[index] = False
        pace = max(self._step_ms, max(self._paces.values(), default=0.0)) / 1000
        self._due = self._end(pace) if pace else 0.0
        return MockPending(found, self._due)

    def _end(self, pace: float) -> float:
        """When this step ends. Where steps follow each other, the loop's own time is part of them, as on a device."""
        now = time.monotonic()
        return (self._due if now - self._due < pace / 2 else now) + pace

    def _fill(self, found: StepResult, index: int, row: Row, special: _Special) -> None:
        """The ids of a row with wishes."""
        position = row.start + row.count
        room = special.prompt_tokens + special.max_tokens - position
        ids: list[int] = []
        while len(ids) < min(special.width, room):
            ids.append(self._id(row.slot, position + len(ids), special))
            if ids[-1] in special.stops:
                break
        records = [self._logprobs(token, special.logprobs) for token in ids] if special.logprobs >= 0 else []
        found.ids[index] = ids[0]
        if records:
            found.logprobs[index] = records[0]
        if len(ids) > 1:
            found.further[index] = Further(ids[1:], records[1:])

    def _id(self, slot: int, position: int, special: _Special) -> int:
        """The id at an absolute position: of the script, EOS behind it, or a word where EOS may not be."""
        script, number, words = special.script, position - special.prompt_tokens, self._model.words
        if script is not None and number < len(script):
            return int(script[number])
        if script is not None:
            held_back = special.stops if position < special.min_position else special.banned
            for token in self._model.eos_ids:
                if token not in special.banned and token not in held_back:
                    return token
        return int(words[(self._seeds[slot] + position * STRIDE) % len(words)])

    def _logprobs(self, token: int, top: int) -> Logprobs:
        """A made-up distribution: the chosen id has probability 1/2, the words after it 1/4, 1/8, ..."""
        words = self._model.words
        first = int(np.searchsorted(words, token))
        others = [int(words[(first + number) % len(words)]) for number in range(top + 1)]
        ids = [token, *dict.fromkeys(item for item in others if item != token)][:top]
        return Logprobs(float(np.log(0.5)), ids, [float(-(number + 1) * np.log(2.0)) for number in range(len(ids))])


def _number(hooks: dict[str, Any], name: str, default: float) -> float:
    value = hooks.get(name, default)
    if type(value) not in (int, float) or not default <= value <= MOST_STEP_MS:
        raise ValueError(f"the hook {name} must be a number from {default} to {MOST_STEP_MS:g}")
    return float(value)
