"""Every message that crosses a process border, named for what it says.

A message travels as one header frame (link header + msgpack of a tagged array, see `wire.link`) followed by
raw frames: token ids as little-endian int32, block keys as 32 bytes each. Nothing here holds a tensor or a pickle.

Ids. `rid` is the internal id of a request: a 63-bit integer whose low 8 bits are zero, made by `RequestIds`.
`sid = rid | choice` is the id of one sequence (choice 0..255). Client ids are labels and never travel here.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

PROTOCOL_VERSION = 1
CHOICE_BITS = 8
CHOICE_MASK = (1 << CHOICE_BITS) - 1


class RequestIds:
    """Internal request ids of one process start: 23 random bits | 32 counter bits | 8 zero bits."""

    def __init__(self) -> None:
        self._base = secrets.randbits(23) << 40
        self._next = 0

    def new(self) -> int:
        self._next = (self._next + 1) & 0xFFFFFFFF
        return self._base | (self._next << CHOICE_BITS)


def rid_of(sid: int) -> int:
    """The request that a sequence belongs to."""
    return sid & ~CHOICE_MASK


def choice_of(sid: int) -> int:
    """The choice index (0..255) of a sequence in its request."""
    return sid & CHOICE_MASK


class Message(msgspec.Struct, array_like=True, tag=True, tag_field="message"):
    """Base of all messages: a msgpack array whose first item is the type's name."""


class Record(msgspec.Struct, array_like=True):
    """A part of a message: a plain msgpack array."""


# --- link: who is there -------------------------------------------------------------------------------------------


class Hello(Message):
    """Dialer → listener, first message on a link (and again when asked by `Who`)."""

    version: int
    role: str  # "frontend" | "tokenizer" | "engine"
    index: int
    generation: int
    secret: bytes
    pid: int
    engine: EngineInfo | None = None


class Welcome(Message):
    """Listener → dialer: the hello was accepted; `session` goes into each later header to this listener."""

    version: int
    role: str
    generation: int
    session: int
    service: ServiceInfo | None = None  # None until an engine is known; then a ServiceStatus follows


class Who(Message):
    """Listener → dialer: I do not know you (I restarted); say hello again."""

    generation: int


class Refused(Message):
    """Listener → dialer: the hello was not accepted; the dialer ends with this reason."""

    reason: str


class Heartbeat(Message):
    """Dialer → listener, each second, from a thread and socket of its own (`wire.link.Beat`)."""

    generation: int


class Resync(Message):
    """Receiver → sender after a gap: repeat for each live sequence the ids from `offsets[i]` on."""

    sids: list[int]
    offsets: list[int]


class EngineInfo(Record):
    """What an engine tells about itself once its model is ready."""

    model_digest: str  # hex content digest over all tensors
    cache_format: str  # dtype and layout of cached blocks; part of the root
    vocab_size: int  # ids outside [0, vocab_size) are refused
    context_length: int  # min(model or --context-length, pool)
    model_context_length: int
    pool_tokens: int  # tokens that the block pool can hold in all
    block_tokens: int
    keep_tokens: int
    eos_ids: list[int]
    max_running: int
    dtype: str
    device: str


class ServiceInfo(Record):
    """What every process may know of the service: merged from its engines (they must agree)."""

    model_digest: str
    cache_format: str
    vocab_size: int
    context_length: int
    block_tokens: int
    keep_tokens: int
    eos_ids: list[int]


class ServiceStatus(Message):
    """Router → frontends and tokenizers, on each change and each second."""

    state: str  # "loading" | "ok" | "degraded" | "down"
    reason: str
    ranks_ready: int
    ranks: int
    service: ServiceInfo | None = None
    retry_after: int = 1


# --- a request on its way in --------------------------------------------------------------------------------------


class Sampling(Record):
    """Sampling fields as the client gave them; None takes the model's default (see `tokenizer_proc`)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1 = off
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = []
    stop_token_ids: list[int] = []
    logprobs: int = -1  # -1 = none; else number of top alternatives (0 = the chosen one only)


class Shape(Record):
    """What the frontend must know to answer: the form of the response, nothing of its content."""

    route: str  # "chat" | "completions"
    model: str
    stream: bool
    n: int  # number of choices in the response (prompts x n)
    include_usage: bool
    continuous_usage: bool
    logprobs: int  # as Sampling.logprobs
    echo: bool = False
    dump_prompt: bool = False
    prompts: int = 1  # prompt i has the choices [i * k, (i + 1) * k) with k = n / prompts


class Generate(Message):
    """Frontend → tokenizer: a checked request. With `messages` (chat) or `prompts` (completions).

    Bodies above the in-line limit travel unparsed: then `shape` is None and one raw frame holds the body; the
    tokenizer runs the same `api` parser and sends the shape back in `Accepted`.
    """

    rid: int
    tenant: str
    shape: Shape | None
    sampling: Sampling
    route: str = "chat"
    messages: list[dict[str, Any]] | None = None  # content already joined to a string
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    prompts: list[str | list[int]] | None = None
    session_key: str = ""  # X-Session-ID, X-Correlation-ID, session_id or prompt_cache_key
    user: str = ""
    prefix_cache: bool = True
    timeout: float = 0.0  # seconds from now; 0 = none
    hooks: dict[str, Any] | None = None  # only with --test-hooks
    content_type: str = ""


class Params(Record):
    """What the engine needs to produce one sequence; every default is resolved."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int = -1
    logit_bias: dict[int, float] = {}
    prefix_cache: bool = True
    hooks: dict[str, Any] | None = None


class Submit(Message):
    """Tokenizer → router (attempt 0, one for all `n` sequences) and router → engine (one per sequence).

    Frames: prompt ids (int32), block keys (32 bytes each, full blocks only), and from the router ids already
    produced (int32, empty at first). The sequences are sid, sid+1, ... sid+n-1.
    """

    sid: int
    attempt: int
    n: int
    tenant: str
    params: Params
    session_key: str = ""
    user: str = ""
    first_hash: bytes = b""  # 16 bytes: hash of system + first user message, for routing
    timeout: float = 0.0
    render_context: bytes = b""  # opaque to the router; what the tokenizer needs to go on


class Accepted(Message):
    """An engine has these sequences in its queue. Engine → router → tokenizer → frontend (there: one per request)."""

    sids: list[int]
    attempts: list[int]
    rank: int = -1
    reason: str = ""
    shape: Shape | None = None
    prompt_tokens: int = 0
    prompt_ids: list[int] | None = None  # only with the dump hook


class Rejected(Message):
    """The request ends here before its first byte. Any process → towards the frontend."""

    rid: int
    status: int
    type: str
    code: str | None
    param: str | None
    text: str
    retry_after: int = 0


class Abort(Message):
    """End these sequences, whatever their state. Idempotent; unknown ids are no error.

    `reason`: "client" (gone), "stop" (a stop string matched), "stall", "deadline", "shutdown", "admin".
    """

    sids: list[int]
    reason: str


# --- a request on its way out -------------------------------------------------------------------------------------


class Usage(Record):
    """Token counts of one sequence, of its first admission."""

    prompt_tokens: int
    cached_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    miss_reason: str = ""


class Finished(Record):
    """The one terminal event of a sequence.

    `reason`: "stop" (EOS or a stop id), "length", "abort", or "error" with `code` (an in-band code of the contract).
    """

    sid: int
    attempt: int
    reason: str
    completion_tokens: int
    usage: Usage
    code: str = ""
    stop_id: int = -1  # the EOS or stop id that ended it; it is the last produced id


class TokenLogprobs(Record):
    """Log-probabilities (natural log, of the model's own distribution) of one produced token."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class SequenceLogprobs(Record):
    """Records for the ids [offset, offset + len) of one sequence."""

    sid: int
    offset: int
    tokens: list[TokenLogprobs]


class StepOutput(Message):
    """Engine → router → tokenizer: all new ids since the last one, of all sequences; one frame of int32 ids.

    `offsets[i]` is the number of ids the sequence had before; ids of sequence i follow those of i-1 in the frame.
    """

    sids: list[int]
    attempts: list[int]
    offsets: list[int]
    counts: list[int]
    finished: list[Finished] = []
    logprobs: list[SequenceLogprobs] = []


class TextDelta(Record):
    """New text of one sequence. `offset` counts characters sent before, `tokens` all ids produced so far."""

    sid: int
    offset: int
    text: str
    tokens: int
    finish_reason: str = ""  # "" | "stop" | "length" | "tool_calls"; set in the last delta only
    usage: Usage | None = None  # set in the last delta only
    error: str = ""  # an in-band code; then the sequence ended without a finish_reason
    # JSON array with an entry per produced token. chat: {"token", "logprob", "bytes", "top_logprobs": [...]};
    # completions: {"token", "token_logprob", "top_logprobs": {token: logprob} or null, "text_offset"}.
    logprobs: bytes = b""


class TextOutput(Message):
    """Tokenizer → frontend: everything new, of all its sequences, in order."""

    deltas: list[TextDelta]


# --- numbers and control ------------------------------------------------------------------------------------------


class Histogram(Record):
    """Cumulative counts are made when printed: `counts[i]` falls in bucket i, the last one is +Inf."""

    bounds: list[float]
    counts: list[int]
    total: float


class Stats(Message):
    """Any process → router, when changed, at most each 250 ms: its own numbers, absolute since its start.

    Keys are `name` or `name{label="value"}`. `detail` is for /deepinfer/metrics.
    """

    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, Histogram]
    detail: dict[str, Any] = {}


class MetricsQuery(Message):
    """Frontend → router. `form`: "prometheus" | "json"."""

    query: int
    form: str


class MetricsReply(Message):
    """Router → frontend; one raw frame with the page's bytes."""

    query: int


class Hook(Message):
    """Frontend → router → engine (only with --test-hooks): flush_device_cache, drop_cached_block, check_pools, ..."""

    query: int
    rank: int
    name: str
    args: dict[str, Any]


class HookReply(Message):
    """Engine → router → frontend."""

    query: int
    ok: bool
    result: Any = None


MESSAGES = (
    Hello | Welcome | Who | Refused | Heartbeat | Resync | ServiceStatus | Generate | Submit | Accepted | Rejected
    | Abort | StepOutput | TextOutput | Stats | MetricsQuery | MetricsReply | Hook | HookReply
)  # fmt: skip

encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(MESSAGES)
