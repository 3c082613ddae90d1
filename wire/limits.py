"""Limits on what a client may send, shared by the frontend and the tokenizer."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Set by flags of the same names; the context length comes from the engines (`ServiceInfo`)."""

    max_n: int = 8
    max_messages: int = 2048
    max_tools: int = 128
    max_stop: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 300
    max_top_logprobs: int = 20
    max_completion_logprobs: int = 5
    max_json_depth: int = 64
    max_body_bytes: int = 32 << 20
    inline_body_bytes: int = 4 << 20  # larger bodies are parsed by the tokenizer, off the event loop
    template_kwargs: tuple[str, ...] = ("enable_thinking", "reasoning_effort")
