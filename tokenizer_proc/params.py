"""Sampling parameters with every default resolved, and checks that need the model's vocabulary and context length."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection
from typing import Any

import msgspec

from api.errors import ApiError, invalid
from wire.messages import Generate, Params, Sampling, ServiceInfo

CHARS_PER_TOKEN = 16  # no prompt has tokens of more characters on average
INT32_MAX = (1 << 31) - 1


class Defaults(msgspec.Struct, frozen=True):
    """Values for sampling fields that a client leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def defaults_from(generation: dict[str, Any]) -> Defaults:
    """From a generation_config.json: what it names. `"do_sample": false` means greedy.

    Raises ValueError naming the field for a value that no client could give either.
    """

    def number(name: str, low: float, high: float, default: float) -> float:
        value = generation.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"generation_config.json: {name} must be a number from {low:g} to {high:g}")
        return float(value)

    top_k = int(number("top_k", -1, INT32_MAX, -1))
    return Defaults(
        temperature=0.0 if generation.get("do_sample") is False else number("temperature", 0, 2, 1.0),
        top_p=number("top_p", 0, 1, 1.0) or 1.0,
        top_k=top_k if top_k > 0 else -1,
        min_p=number("min_p", 0, 1, 0.0),
        repetition_penalty=number("repetition_penalty", 0, 10, 1.0) or 1.0,
    )


def check_ids(sampling: Sampling, vocab_size: int) -> None:
    """Token ids in sampling fields are ids of the model."""
    if any(number >= vocab_size for number in sampling.stop_token_ids):
        raise invalid("stop_token_ids", f"stop_token_ids must hold token ids below {vocab_size}")
    if any(number >= vocab_size for number in sampling.logit_bias or ()):
        raise invalid("logit_bias", f"keys of logit_bias must be token ids below {vocab_size}")


def check_prompt_ids(ids: Collection[int], vocab_size: int) -> None:
    """A prompt of token ids: not empty, each an id of the model."""
    if not ids:
        raise invalid("prompt", "prompt must have at least one token")
    if not (min(ids) >= 0 and max(ids) < vocab_size):
        raise invalid("prompt", f"prompt must hold token ids from 0 to {vocab_size - 1}")


def check_chars(count: int, context_length: int, param: str) -> None:
    """Refuse, before anything is encoded, what cannot fit."""
    if count > context_length * CHARS_PER_TOKEN:
        raise _too_long(
            param, context_length, f"the {param} have {count} characters, more than {count // CHARS_PER_TOKEN} tokens"
        )


def max_tokens_for(sampling: Sampling, prompt_tokens: int, context_length: int, default: int, param: str) -> int:
    """How many tokens may be produced. Raises ApiError context_length_exceeded when they do not fit."""
    room = context_length - prompt_tokens
    wanted = sampling.max_tokens
    if wanted is None:
        if room < 1:
            raise _too_long(
                param, context_length, f"the {param} have {prompt_tokens} tokens, with none left to produce"
            )
        return min(room, default) if default else room
    if wanted > room:
        raise _too_long(
            param,
            context_length,
            f"more were asked for: {prompt_tokens} in the {param} and "
            f"{'at least ' if wanted >= INT32_MAX else ''}{wanted} to produce",
        )
    return wanted


def _too_long(param: str, context_length: int, text: str) -> ApiError:
    message = f"This model's maximum context length is {context_length} tokens; {text}."
    return invalid(param, message, "context_length_exceeded")


def resolve(generate: Generate, defaults: Defaults, service: ServiceInfo, max_tokens: int) -> Params:
    """What the engine needs; a seed is drawn where the client gave none."""
    given = generate.sampling

    def pick(value: float | None, default: float) -> float:
        return default if value is None else value

    return Params(
        temperature=pick(given.temperature, defaults.temperature),
        top_p=pick(given.top_p, defaults.top_p),
        top_k=min(service.vocab_size, defaults.top_k if given.top_k is None else given.top_k),
        min_p=pick(given.min_p, defaults.min_p),
        presence_penalty=given.presence_penalty or 0.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        repetition_penalty=pick(given.repetition_penalty, defaults.repetition_penalty),
        seed=secrets.randbits(63) if given.seed is None else given.seed,
        max_tokens=max_tokens,
        min_tokens=min(given.min_tokens, max_tokens),
        ignore_eos=given.ignore_eos,
        stop_token_ids=given.stop_token_ids,
        logprobs=given.logprobs,
        logit_bias=given.logit_bias or {},
        prefix_cache=generate.prefix_cache,
        hooks=generate.hooks,
    )
