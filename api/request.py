"""A whole request body to `Generate` and `Shape`, for both routes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from api.decode import decode_object
from api.errors import INVALID, ApiError, invalid, unsupported
from api.fields import Object, boolean, check_integers, integer, is_ids, mapping, string
from api.messages import parse_messages, parse_tools
from api.sampling import parse_n, parse_sampling, refuse_unsupported
from wire.limits import Limits
from wire.messages import CHOICE_MASK, Generate, Sampling, Shape

MAX_KEY_CHARS = 128  # a longer session key is replaced by its hash
MAX_TEMPLATE_VALUE_CHARS = 64
MAX_TEMPLATE_NUMBER = 1 << 53
MAX_CHOICES = CHOICE_MASK + 1
HOOKS_FIELD = "deepinfer_hooks"

Parsed = tuple[Generate, Shape]


def parse(route: str, body: bytes, limits: Limits, served: Collection[str], test_hooks: bool = False) -> Parsed:
    """Check the body of a POST to `route` ("chat" | "completions").

    The `Generate` has rid 0 and no tenant (see `adopt`); its `shape` is the second item. Raises ApiError (400, 404).
    """
    return (parse_chat if route == "chat" else parse_completions)(body, limits, served, test_hooks)


def parse_chat(body: bytes, limits: Limits, served: Collection[str], test_hooks: bool = False) -> Parsed:
    """The body of POST /v1/chat/completions."""
    source = decode_object(body, limits.max_json_depth)
    model = _model(source, served)
    messages = parse_messages(source, limits)
    refuse_unsupported(source)
    n = parse_n(source, limits)
    sampling = parse_sampling(source, limits, _chat_logprobs(source, limits), chat=True)
    hooks = _hooks(source) if test_hooks else None
    shape = _shape(source, "chat", model, n, sampling.logprobs, hooks)
    generate = _generate(source, shape, sampling, hooks)
    generate.messages = messages
    generate.tools = parse_tools(source, limits)
    generate.template_kwargs = _template_kwargs(source, limits)
    return generate, shape


def parse_completions(body: bytes, limits: Limits, served: Collection[str], test_hooks: bool = False) -> Parsed:
    """The body of POST /v1/completions."""
    source = decode_object(body, limits.max_json_depth)
    model = _model(source, served)
    prompts = _prompts(source)
    refuse_unsupported(source)
    n = parse_n(source, limits)
    if n * len(prompts) > MAX_CHOICES:
        raise invalid("prompt", f"prompt and n ask for more than {MAX_CHOICES} choices")
    logprobs = integer(source, "logprobs", 0, limits.max_completion_logprobs)
    echo = boolean(source, "echo") or False
    if echo and logprobs is not None:
        raise unsupported("echo", "echo together with logprobs is not supported")
    sampling = parse_sampling(source, limits, -1 if logprobs is None else logprobs, chat=False)
    hooks = _hooks(source) if test_hooks else None
    shape = _shape(source, "completions", model, n * len(prompts), sampling.logprobs, hooks)
    shape.echo, shape.prompts = echo, len(prompts)
    generate = _generate(source, shape, sampling, hooks)
    generate.prompts = prompts
    return generate, shape


def adopt(parsed: Generate, envelope: Generate) -> Generate:
    """Give a parsed request what came with it outside its body: id, tenant, deadline, session header."""
    parsed.rid, parsed.tenant, parsed.timeout = envelope.rid, envelope.tenant, envelope.timeout
    if envelope.session_key:
        parsed.session_key = envelope.session_key
    return parsed


def short_key(key: str) -> str:
    """A session key of bounded length: itself, or the hash of a long one."""
    return key if len(key) <= MAX_KEY_CHARS else hashlib.sha256(key.encode()).hexdigest()


def _model(source: Object, served: Collection[str]) -> str:
    model = string(source, "model")
    if model is None:
        raise invalid("model", "model is required")
    if model not in served:
        raise ApiError(404, INVALID, "model_not_found", "model", "this model is not served here")
    return model


def _chat_logprobs(source: Object, limits: Limits) -> int:
    wanted = boolean(source, "logprobs") or False
    top = integer(source, "top_logprobs", 0, limits.max_top_logprobs)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    return (top or 0) if wanted else -1


def _prompts(source: Object) -> list[str | list[int]]:
    prompt = source.get("prompt")
    if type(prompt) is str:
        return [prompt]
    if type(prompt) is list and prompt:
        if type(prompt[0]) is str and all(type(item) is str for item in prompt):
            return list(prompt)
        if type(prompt[0]) is list and all(type(item) is list and item and is_ids(item) for item in prompt):
            return list(prompt)
        if type(prompt[0]) is int and is_ids(prompt):
            return [prompt]
    raise invalid("prompt", "prompt must be a string, an array of strings, or one or more arrays of token ids")


def _shape(source: Object, route: str, model: str, n: int, logprobs: int, hooks: Mapping[str, Any] | None) -> Shape:
    options = mapping(source, "stream_options") or {}
    usage = boolean(options, "include_usage", "stream_options.include_usage")
    continuous = boolean(options, "continuous_usage_stats", "stream_options.continuous_usage_stats")
    return Shape(
        route=route,
        model=model,
        stream=boolean(source, "stream") or False,
        n=n,
        include_usage=usage or False,
        continuous_usage=(usage and continuous) or False,
        logprobs=logprobs,
        dump_prompt=bool(hooks and hooks.get("dump_prompt")),
    )


def _generate(source: Object, shape: Shape, sampling: Sampling, hooks: dict[str, Any] | None) -> Generate:
    keys = [string(source, name) for name in ("session_id", "prompt_cache_key")]
    prefix_cache = boolean(source, "prefix_cache")
    return Generate(
        rid=0,
        tenant="",
        shape=shape,
        sampling=sampling,
        route=shape.route,
        session_key=short_key(next((key for key in keys if key), "")),
        user=short_key(string(source, "user") or ""),
        prefix_cache=prefix_cache is not False,
        hooks=hooks,
    )


def _template_kwargs(source: Object, limits: Limits) -> dict[str, Any] | None:
    found = mapping(source, "chat_template_kwargs")
    for name, value in (found or {}).items():
        # The name is the client's, and the contract wants it named: only a plain one is repeated.
        plain = name.isascii() and name.isidentifier() and len(name) <= 64
        param = f"chat_template_kwargs.{name}" if plain else "chat_template_kwargs"
        if name not in limits.template_kwargs:
            raise invalid(param, f"chat_template_kwargs may only hold {', '.join(limits.template_kwargs)}")
        fits = (
            type(value) is bool
            or (type(value) is str and len(value) <= MAX_TEMPLATE_VALUE_CHARS)
            or (type(value) in (int, float) and abs(value) <= MAX_TEMPLATE_NUMBER)
        )
        if not fits:
            raise invalid(
                param, f"must be a boolean, a number or a string of at most {MAX_TEMPLATE_VALUE_CHARS} characters"
            )
    return dict(found) if found else None


def _hooks(source: Object) -> dict[str, Any] | None:
    """Test hooks: an object, or a string of JSON, in the request's metadata."""
    metadata = mapping(source, "metadata") or {}
    hooks = metadata.get(HOOKS_FIELD)
    if type(hooks) is str:
        try:
            hooks = msgspec.json.decode(hooks)
        except (msgspec.MsgspecError, RecursionError):
            raise invalid("metadata", "the hooks in metadata are not valid JSON") from None
    if hooks is not None and type(hooks) is not dict:
        raise invalid("metadata", "the hooks in metadata must be an object")
    check_integers(hooks, "metadata")
    return hooks
