"""Whole (not streamed) answers, usage, and the two shapes of logprobs."""

from __future__ import annotations

from typing import Any

import msgspec

from frontend.live import Choice, LiveRequest
from wire.messages import Shape, Usage


class LegacyEntry(msgspec.Struct):
    """One produced token in the logprobs of /v1/completions, as the tokenizer sends it."""

    token: str
    token_logprob: float
    top_logprobs: dict[str, float] | None
    text_offset: int


def join_logprobs(parts: list[bytes]) -> bytes:
    """JSON arrays to one JSON array."""
    return parts[0] if len(parts) == 1 else b"[" + b",".join(part[1:-1] for part in parts if part != b"[]") + b"]"


def legacy_logprobs(entries: bytes) -> bytes:
    """Entries per token to the four parallel lists of /v1/completions."""
    found = msgspec.json.decode(entries, type=list[LegacyEntry])
    return msgspec.json.encode(
        {
            "tokens": [entry.token for entry in found],
            "token_logprobs": [entry.token_logprob for entry in found],
            "top_logprobs": [entry.top_logprobs for entry in found],
            "text_offset": [entry.text_offset for entry in found],
        }
    )


def usage_of(live: LiveRequest) -> dict[str, Any]:
    """The usage of an ended request: each prompt counts once, with its first choice's cache figures."""
    prompts = live.shape.prompts if live.shape is not None else 1
    step = max(1, len(live.choices) // max(1, prompts))
    firsts = [choice.usage or Usage(0) for choice in live.choices[::step]]
    prompt = sum(usage.prompt_tokens for usage in firsts)
    made = sum(choice.tokens for choice in live.choices)
    details: dict[str, Any] = {
        "cached_tokens": sum(usage.cached_tokens for usage in firsts),
        "device_tokens": sum(usage.device_tokens for usage in firsts),
        "host_tokens": sum(usage.host_tokens for usage in firsts),
    }
    if reasons := [usage.miss_reason for usage in firsts if usage.miss_reason]:
        details["miss_reason"] = reasons[0]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": details,
    }


def whole_answer(live: LiveRequest, shape: Shape, identity: str, created: int) -> bytes:
    """The JSON body of a request that ended well."""
    chat = shape.route == "chat"
    body: dict[str, Any] = {
        "id": identity,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": shape.model,
        "choices": [_chat_choice(choice) if chat else _text_choice(choice) for choice in live.choices],
        "usage": usage_of(live),
    }
    if live.accepted is not None and live.accepted.prompt_ids is not None:
        body["deepinfer_prompt_ids"] = live.accepted.prompt_ids
    return msgspec.json.encode(body)


def _chat_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs:
        logprobs = {"content": msgspec.Raw(join_logprobs(choice.logprobs)), "refusal": None}
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": "".join(choice.parts)},
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _text_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": "".join(choice.parts),
        "logprobs": msgspec.Raw(legacy_logprobs(join_logprobs(choice.logprobs))) if choice.logprobs else None,
        "finish_reason": choice.finish_reason,
    }
