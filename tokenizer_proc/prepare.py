"""A request's way in, as a function of the request alone: parse, render, encode, check, keys → `Submit`s.

Runs on the loop's thread for small requests and in a worker for large ones; nothing here touches the loop's state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from api import adopt, parse
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.detokenize import Detokenizer
from tokenizer_proc.encode import ID_BYTES, Encoder
from tokenizer_proc.guard import Guard
from tokenizer_proc.model_files import ModelFiles
from tokenizer_proc.params import (
    Defaults,
    check_chars,
    check_ids,
    check_prompt_ids,
    defaults_from,
    max_tokens_for,
    resolve,
)
from tokenizer_proc.render import ChatTemplate
from wire.keys import block_keys, root_key
from wire.messages import Generate, ServiceInfo, Shape, Submit

FIRST_HASH_BYTES = 16
ROOTS = 1024


@dataclass
class Prepared:
    """A request that may go to the router. `frames[i]` are ids and keys of `submits[i]`."""

    generate: Generate
    shape: Shape
    submits: list[Submit]
    frames: list[tuple[bytes, bytes]]
    echo: list[str] = field(default_factory=list)  # with echo: each prompt's text
    prompt_ids: list[int] | None = None

    def shorten_timeout(self, seconds: float) -> bool:
        """Take the time that has passed from the request's own deadline. False when none is left."""
        for submit in self.submits:
            if submit.timeout:
                submit.timeout -= seconds
                if submit.timeout <= 0:
                    return False
        return True

    @property
    def prompt_tokens(self) -> list[int]:
        return [len(ids) // ID_BYTES for ids, _ in self.frames]


class Preparer:
    """Holds what does not change between requests. Methods may run in several threads."""

    def __init__(self, config: TokenizerConfig, files: ModelFiles, encoder: Encoder, detokenizer: Detokenizer) -> None:
        """Raises ValueError for chat templates or generation defaults that cannot be used."""
        self._config = config
        self._encoder = encoder
        self._detokenizer = detokenizer
        origin = f"--chat-template {config.chat_template}" if config.chat_template else ""
        self.template = ChatTemplate(files.templates, files.special_tokens, files.control, origin=origin)
        self._guard = Guard(files.control)
        self._defaults = Defaults() if config.sampling_defaults == "openai" else defaults_from(files.generation)
        self._root = lru_cache(maxsize=ROOTS)(self._make_root)

    def prepare(self, generate: Generate, body: bytes, service: ServiceInfo) -> Prepared:
        """Everything from the request to what the router gets. Raises ApiError."""
        shape = generate.shape
        if shape is None:
            config = self._config
            parsed, shape = parse(generate.route, body, config.limits, config.served_models, config.test_hooks)
            generate = adopt(parsed, generate)
        check_ids(generate.sampling, service.vocab_size)
        self._encoder.longest = service.context_length
        if generate.messages is not None:
            prompts, param = [self._chat_ids(generate, service)], "messages"
            first_hash = _first_hash(generate.messages)
        else:
            prompts, param = [self._prompt_ids(item, service) for item in generate.prompts or []], "prompt"
            first_hash = b""
        root = self._root(self._tenant(generate), service.model_digest, service.cache_format)
        each = shape.n // len(prompts)
        submits, frames = [], []
        for index, ids in enumerate(prompts):
            budget = max_tokens_for(
                generate.sampling,
                len(ids) // ID_BYTES,
                service.context_length,
                self._config.default_max_tokens,
                param,
            )
            submits.append(self._submit(generate, service, budget, index * each, each, first_hash))
            keys = block_keys(root, ids, service.block_tokens, self._config.key_bits)
            frames.append((ids, b"".join(keys)))
        prepared = Prepared(generate, shape, submits, frames)
        if shape.echo:
            prepared.echo = [self._text_of(item) for item in generate.prompts or []]
        if shape.dump_prompt:
            prepared.prompt_ids = np.frombuffer(b"".join(prompts), np.int32).tolist()
        return prepared

    def _submit(
        self, generate: Generate, service: ServiceInfo, budget: int, choice: int, n: int, first_hash: bytes
    ) -> Submit:
        return Submit(
            sid=generate.rid | choice,
            attempt=0,
            n=n,
            tenant=generate.tenant,
            params=resolve(generate, self._defaults, service, budget),
            session_key=generate.session_key,
            user=generate.user,
            first_hash=first_hash,
            timeout=generate.timeout,
        )

    def _chat_ids(self, generate: Generate, service: ServiceInfo) -> bytes:
        messages = generate.messages or []
        check_chars(_chars_of(messages) + _chars_of(generate.tools), service.context_length, "messages")
        ids = self._encoder.chat(*self.template.render(messages, generate.tools, generate.template_kwargs))
        if not ids:
            check_prompt_ids([], service.vocab_size)
        return ids

    def _prompt_ids(self, prompt: str | list[int], service: ServiceInfo) -> bytes:
        if isinstance(prompt, str):
            check_chars(len(prompt), service.context_length, "prompt")
            ids = self._encoder.text(*self._guard.protect_text(prompt))
            if not ids:
                check_prompt_ids([], service.vocab_size)
            return ids
        check_prompt_ids(prompt, service.vocab_size)
        return np.array(prompt, dtype="<i4").tobytes()

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._detokenizer.decode(prompt)

    def _tenant(self, generate: Generate) -> str:
        return "" if self._config.share_prefix_cache else generate.tenant

    def _make_root(self, tenant: str, model_digest: str, cache_format: str) -> bytes:
        return root_key(self._config.cache_secret, model_digest, cache_format, tenant)


def _first_hash(messages: list[dict[str, Any]]) -> bytes:
    """Of system message and first user message, for routing."""
    digest = hashlib.blake2b(digest_size=FIRST_HASH_BYTES)
    for role in ("system", "user"):
        text = next((message["content"] for message in messages if message["role"] == role), "").encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return digest.digest()


def _chars_of(value: Any) -> int:
    """Characters of all strings in a JSON value."""
    count, stack = 0, [value]
    while stack:
        item = stack.pop()
        if type(item) is str:
            count += len(item)
        elif type(item) is list:
            stack += item
        elif type(item) is dict:
            stack += item.values()
            stack += item.keys()
    return count
