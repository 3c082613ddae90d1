"""What the tokenizer process does with each message: requests in, text out, ends and losses."""

from __future__ import annotations

import logging
from collections import deque

from api.errors import ApiError, failure
from tokenizer_proc.detokenize import Detokenizer
from tokenizer_proc.outbox import Outbox
from tokenizer_proc.prepare import Prepared, Preparer
from tokenizer_proc.requests import Request, Table
from tokenizer_proc.text import Sequence
from tokenizer_proc.workers import Outcome, Workers, outcome_of
from wire.link import Dialer, Listener, Peer
from wire.messages import (
    Abort,
    Accepted,
    Generate,
    Message,
    Rejected,
    ServiceStatus,
    StepOutput,
    TextDelta,
    rid_of,
)

INLINE_CHARS = 8192  # longer texts are encoded by a worker
USAGE_WAIT_SECONDS = 1.0  # how long the end after a stop string waits for the engine's usage

log = logging.getLogger("deepinfer.tokenizer")


class Service:
    """All state of the process beside its links. Everything runs on the loop's thread."""

    def __init__(
        self,
        listener: Listener,
        router: Dialer,
        preparer: Preparer,
        detokenizer: Detokenizer,
        workers: Workers,
    ) -> None:
        self.table = Table()
        self.outbox = Outbox(listener)
        self.status: ServiceStatus | None = None
        self.inbox: deque[tuple[Request, Generate, bytes]] = deque()
        self.late = 0
        self._router, self._preparer, self._detokenizer, self._workers = router, preparer, detokenizer, workers
        self._dirty: list[Sequence] = []
        self._stopped: dict[int, Sequence] = {}  # a stop string matched; the engine's last word is not here yet
        self._aborts: list[Abort] = []  # wait for room in the router's queue

    # --- from frontends -------------------------------------------------------------------------------------------

    def on_frontend(self, peer: Peer, message: Message, frames: list[bytes], now: float) -> bool:
        """False for a message that frontends do not send."""
        match message:
            case Generate():
                request = Request(message, peer, now)
                if request.rid in self.table.requests:
                    return False
                self.table.add(request)
                self.inbox.append((request, message, frames[0] if frames else b""))
            case Abort():
                self._abort(message)
            case _:
                return False
        return True

    def start_next(self, now: float) -> None:
        """Prepare the oldest request of the inbox, or give it to a worker."""
        request, generate, body = self.inbox.popleft()
        if request.gone:
            return
        status = self.status
        if status is None or status.service is None or not self._router.ready:
            self._refuse(request, failure("engine_unavailable", 1 if status is None else status.retry_after))
        elif body or _is_large(generate):
            self._workers.submit(request, generate, body, status.service)
        else:
            outcome = outcome_of(self._preparer.prepare, generate, body, status.service)
            self.on_outcome(request, outcome, now)

    def on_outcome(self, request: Request, outcome: Outcome, now: float) -> None:
        """A request is prepared (or refused): send it to the router."""
        if request.gone:
            return
        if not isinstance(outcome, ApiError) and not outcome.shorten_timeout(now - request.started):
            outcome = failure("request_timeout")
        if isinstance(outcome, ApiError):
            self._refuse(request, outcome)
            return
        service = None if self.status is None else self.status.service
        if service is not None:
            self._detokenizer.cover(service.vocab_size)
        self.table.begin(request, outcome, self._detokenizer)
        if not self._send_submits(outcome):
            self._end_all(request, "engine_unavailable")

    def _send_submits(self, prepared: Prepared) -> bool:
        return all(
            self._router.send(submit, ids, keys)
            for submit, (ids, keys) in zip(prepared.submits, prepared.frames, strict=True)
        )

    def _abort(self, message: Abort) -> None:
        found: dict[int, list[int]] = {}
        for sid in message.sids:
            found.setdefault(rid_of(sid), []).append(sid)
        live: list[int] = []
        for rid, sids in found.items():
            if (request := self.table.requests.get(rid)) is not None:
                live += self._release(request, sids if request.prepared is not None else None)
        if live:
            self._send_abort(Abort(live, message.reason))

    def lose_frontend(self, peer: Peer) -> None:
        """A frontend is gone, and with it its clients."""
        self.outbox.drop(peer.identity)
        for request in self.table.of_peer(peer):
            if live := self._release(request):
                self._send_abort(Abort(live, "client"))

    # --- from the router ------------------------------------------------------------------------------------------

    def on_router(self, message: Message, frames: list[bytes], now: float) -> bool:
        """False for a message that the router does not send."""
        match message:
            case StepOutput():
                return self._on_step(message, frames, now)
            case Accepted():
                self._on_accepted(message)
            case Rejected():
                self._on_rejected(message)
            case ServiceStatus():
                self.status = message
            case _:
                return False
        return True

    def _on_accepted(self, message: Accepted) -> None:
        groups: dict[int, list[int]] = {}
        for sid, attempt in zip(message.sids, message.attempts, strict=True):
            if (sequence := self.table.sequences.get(sid)) is not None and not sequence.accepted:
                sequence.accepted, sequence.attempt = True, attempt
                groups.setdefault(rid_of(sid), []).append(sid)
            elif sequence is not None:
                sequence.attempt = max(sequence.attempt, attempt)
        for rid, sids in groups.items():
            request = self.table.requests[rid]
            request.was_accepted = True
            prepared = request.prepared
            self.outbox.tell(
                request.peer,
                Accepted(
                    sids=sids,
                    attempts=[request.live[sid].attempt for sid in sids],
                    rank=message.rank,
                    reason=message.reason,
                    shape=request.shape if request.raw else None,
                    prompt_tokens=sum(request.prompt_tokens),
                    prompt_ids=None if prepared is None else prepared.prompt_ids,
                ),
            )
            for sid in sids if request.echo else ():
                self._echo(request, request.live[sid])

    def _echo(self, request: Request, sequence: Sequence) -> None:
        text = request.echo[request.prompt_of(sequence.sid)]
        if text:
            self.outbox.put(request.peer, TextDelta(sequence.sid, sequence.offset, text, 0))
            sequence.offset += len(text)
            sequence.text_chars += len(text)

    def _on_rejected(self, message: Rejected) -> None:
        request = self.table.requests.get(rid_of(message.rid))
        if request is None:
            return
        if live := self._release(request):
            self._send_abort(Abort(live, "admin"))  # its other sequences, if some are on their way
        message.rid = request.rid
        self.outbox.tell(request.peer, message)

    def _on_step(self, message: StepOutput, frames: list[bytes], now: float) -> bool:
        ids = memoryview(frames[0] if frames else b"").cast("i")
        if len(ids) != sum(message.counts):
            return False
        pieces = self._detokenizer.pieces(ids)
        sequences, dirty = self.table.sequences, self._dirty
        position = 0
        for sid, attempt, offset, count in zip(
            message.sids, message.attempts, message.offsets, message.counts, strict=True
        ):
            start, position = position, position + count
            sequence = sequences.get(sid)
            if sequence is None or (attempt != sequence.attempt and sequence.accepted):
                self.late += 1
                continue
            if offset != sequence.received:
                if offset > sequence.received:
                    self._lose_sequence(sequence)
                    continue
                start = min(position, start + sequence.received - offset)
            sequence.pieces += pieces[start:position]
            if sequence.request.logprobs >= 0:
                sequence.ids += ids[start:position].tolist()
            sequence.received += position - start
            if not sequence.dirty:
                sequence.dirty = True
                dirty.append(sequence)
        for records in message.logprobs:
            if (sequence := sequences.get(records.sid)) is not None and not sequence.take_logprobs(records):
                self._lose_sequence(sequence)
        for finished in message.finished:
            sequence = sequences.get(finished.sid)
            if sequence is not None and (finished.attempt == sequence.attempt or not sequence.accepted):
                sequence.end = finished
                if not sequence.dirty:
                    sequence.dirty = True
                    dirty.append(sequence)
        return True

    def _lose_sequence(self, sequence: Sequence) -> None:
        """Ids are missing: nothing right can be shown any more."""
        log.error("output of a sequence is missing, it ends with internal_error")
        self._send_abort(Abort([sequence.sid], "admin"))
        self._fail(sequence, "internal_error")

    def lose_router(self) -> None:
        """Everything under way is over."""
        self._aborts.clear()
        for request in list(self.table.requests.values()):
            if request.prepared is not None:
                self._end_all(request, "engine_unavailable")

    # --- out ------------------------------------------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Turn everything that came into deltas, and send one message per frontend."""
        if self._dirty:
            detokenizer, put, sequences = self._detokenizer, self.outbox.put, self.table.sequences
            for sequence in self._dirty:
                sequence.dirty = False
                if sequence.sid not in sequences:
                    continue
                delta = sequence.delta(detokenizer, now)
                if sequence.end is None and not sequence.stopped_at:
                    if delta is not None:
                        put(sequence.request.peer, delta)
                else:
                    self._on_end(sequence, delta)
            self._dirty = []
        if self._aborts:
            self._retry_aborts()
        if self.outbox.waiting:
            self.outbox.flush()

    def _on_end(self, sequence: Sequence, delta: TextDelta | None) -> None:
        """A sequence has ended, or a stop string matched."""
        request = sequence.request
        if delta is not None and delta.error:
            self._fail(sequence, delta.error)
            return
        if delta is not None:
            self.outbox.put(request.peer, delta)
        if not sequence.stopped_at:
            self._release(request, [sequence.sid])
        elif sequence.end is not None:
            self._finish_stopped(sequence)
        elif sequence.sid not in self._stopped:
            self._stopped[sequence.sid] = sequence
            self._send_abort(Abort([sequence.sid], "stop"))

    def _finish_stopped(self, sequence: Sequence) -> None:
        self.outbox.put(sequence.request.peer, sequence.stopped())
        self._release(sequence.request, [sequence.sid])

    def tick(self, now: float) -> None:
        """Things that wait: ends after a stop string whose usage does not come, aborts, peers that take nothing."""
        for sequence in list(self._stopped.values()):
            if now - sequence.stopped_at > USAGE_WAIT_SECONDS:
                self._finish_stopped(sequence)
        self._retry_aborts()
        for peer in self.outbox.full:
            log.error("%s takes no messages, it is given up", peer.name)
            self.lose_frontend(peer)
        self.outbox.full.clear()

    # --- ends -----------------------------------------------------------------------------------------------------

    def _refuse(self, request: Request, error: ApiError) -> None:
        """The request ends before its first byte."""
        self._release(request)
        self.outbox.tell(request.peer, rejection(request.rid, error))

    def _fail(self, sequence: Sequence, code: str) -> None:
        """One sequence ends with an error: in-band, or as the answer if nothing of the request was accepted."""
        request = sequence.request
        if not request.was_accepted:
            self._end_all(request, code)
            return
        self.outbox.put(request.peer, TextDelta(sequence.sid, sequence.offset, "", sequence.tokens, error=code))
        self._release(request, [sequence.sid])

    def _end_all(self, request: Request, code: str) -> None:
        """A failure of the service ends a whole request."""
        if request.was_accepted:
            for sequence in list(request.live.values()):
                if sequence.stopped_at:
                    self._finish_stopped(sequence)  # its text is complete whatever happened to the engine
                else:
                    self._fail(sequence, code)
            return
        retry = 1 if self.status is None else self.status.retry_after
        if live := self._release(request):
            self._send_abort(Abort(live, "admin"))
        self.outbox.tell(request.peer, rejection(request.rid, failure(code, retry)))

    def _release(self, request: Request, sids: list[int] | None = None) -> list[int]:
        ended = self.table.release(request, sids)
        for sid in ended:
            self._stopped.pop(sid, None)
        return ended

    def _send_abort(self, message: Abort) -> None:
        if self._router.ready and (self._aborts or not self._router.send(message)):
            self._aborts.append(message)

    def _retry_aborts(self) -> None:
        while self._aborts and self._router.send(self._aborts[0]):
            del self._aborts[0]


def rejection(rid: int, error: ApiError) -> Rejected:
    """The message for an error found here."""
    retry = next((int(value) for name, value in error.headers if name == b"retry-after"), 0)
    return Rejected(rid, error.status, error.type, error.code, error.param, error.message, retry)


def _is_large(generate: Generate) -> bool:
    """Whether encoding may take longer than others should wait."""
    count = sum(len(message["content"]) for message in generate.messages or ())
    for prompt in generate.prompts or ():
        count += len(prompt)
    return count > INLINE_CHARS or bool(generate.tools and len(generate.tools) > 32)
