"""Live requests of this process: who asked, their sequences, and the one function that releases what they hold."""

from __future__ import annotations

from tokenizer_proc.detokenize import Detokenizer
from tokenizer_proc.prepare import Prepared
from tokenizer_proc.stops import StopMatcher, stop_set
from tokenizer_proc.text import Sequence
from wire.link import Peer
from wire.messages import Generate, Shape


class Request:
    """From `Generate` until its last sequence has ended. `sequences` is empty while it is being encoded."""

    __slots__ = (
        "chat",
        "echo",
        "gone",
        "ignore_eos",
        "live",
        "logprobs",
        "min_tokens",
        "peer",
        "prepared",
        "prompt_tokens",
        "raw",
        "rid",
        "started",
        "was_accepted",
    )

    def __init__(self, generate: Generate, peer: Peer, now: float) -> None:
        self.rid = generate.rid
        self.peer = peer
        self.started = now
        self.raw = generate.shape is None  # the frontend does not know its shape yet
        self.live: dict[int, Sequence] = {}
        self.was_accepted = False
        self.gone = False  # released: whoever still works on it may stop
        self.prepared: Prepared | None = None
        self.prompt_tokens: list[int] = []
        self.chat = True
        self.logprobs = -1
        self.min_tokens = 0
        self.ignore_eos = False
        self.echo: list[str] = []

    def begin(self, prepared: Prepared, detokenizer: Detokenizer) -> None:
        """Make the sequences of an encoded request."""
        sampling, shape = prepared.generate.sampling, prepared.shape
        self.prepared = prepared
        self.prompt_tokens = prepared.prompt_tokens
        self.chat = shape.route == "chat"
        self.logprobs, self.min_tokens = sampling.logprobs, sampling.min_tokens
        self.ignore_eos, self.echo = sampling.ignore_eos, prepared.echo
        stops = stop_set(sampling.stop) if sampling.stop else None
        for submit in prepared.submits:
            for sid in range(submit.sid, submit.sid + submit.n):
                matcher = StopMatcher(stops) if stops is not None else None
                self.live[sid] = Sequence(sid, self, detokenizer.start(), matcher)

    @property
    def shape(self) -> Shape | None:
        return None if self.prepared is None else self.prepared.shape

    def prompt_of(self, sid: int) -> int:
        """Index of the prompt that a sequence continues."""
        shape = self.shape
        return 0 if shape is None else (sid - self.rid) * len(self.prompt_tokens) // shape.n

    def prompt_tokens_of(self, sid: int) -> int:
        return self.prompt_tokens[self.prompt_of(sid)]


class Table:
    """All live requests, and their sequences by id."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.sequences: dict[int, Sequence] = {}

    def add(self, request: Request) -> None:
        self.requests[request.rid] = request

    def begin(self, request: Request, prepared: Prepared, detokenizer: Detokenizer) -> None:
        request.begin(prepared, detokenizer)
        self.sequences.update(request.live)

    def release(self, request: Request, sids: list[int] | None = None) -> list[int]:
        """Free what these sequences hold (None: all), and the request with its last one. The one place.

        Gives the sequences that were live; those are the ones to abort if they still run. Idempotent.
        """
        ended = [sid for sid in (list(request.live) if sids is None else sids) if sid in request.live]
        for sid in ended:
            del request.live[sid], self.sequences[sid]
        if not request.live and (sids is None or request.prepared is not None):
            self.requests.pop(request.rid, None)
            request.gone = True
        return ended

    def of_peer(self, peer: Peer) -> list[Request]:
        return [request for request in self.requests.values() if request.peer is peer]

    def check(self) -> None:
        """Raises AssertionError when the two maps do not fit together."""
        owned = {sid for request in self.requests.values() for sid in request.live}
        assert owned == self.sequences.keys(), "sequences without a request, or requests without their sequences"
