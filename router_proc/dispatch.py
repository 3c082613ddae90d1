"""The way in: a request is admitted, placed, journalled and given to a rank, or refused with the reason."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from api.errors import FAILURES, ApiError, failure
from router_proc.journal import Prompt, Sequence, State, rebuild
from router_proc.live import Live
from router_proc.outbox import Tokenizer
from router_proc.placement import Choice, Wanted
from router_proc.ranks import Rank, Service
from wire.link import Listener
from wire.messages import Accepted, Finished, Rejected, Submit, Usage, rid_of

DEFAULT_BLOCK_TOKENS = 128
MIN_DEADLINES = 1024


class Dispatcher:
    """`on_gone(rank)` is called when a send finds nobody at a rank."""

    def __init__(self, listener: Listener, live: Live, service: Service, on_gone: Callable[[Rank], None]) -> None:
        self._listener, self._live, self._service, self._on_gone = listener, live, service, on_gone
        self._deadlines: list[tuple[float, int, int]] = []  # monotonic seconds, first sid, n

    def submit(self, tokenizer: Tokenizer, message: Submit, frames: list[bytes], now: float) -> bool:
        """Take a request in. False for one that is no good as a message (it is answered all the same)."""
        live = self._live
        info = self._service.info
        wrong = live.journal.refusal(message, frames, DEFAULT_BLOCK_TOKENS if info is None else info.block_tokens)
        if wrong:
            if message.sid not in live.journal.sequences:
                self._refuse(tokenizer, message.sid, failure("internal_error"))
            return False
        if live.journal.is_known(message):
            return False  # the first one of this id goes on
        ids, keys = frames
        tokens = len(ids) // 4
        if not any(rank.ready for rank in live.ranks):
            self._refuse(tokenizer, message.sid, failure("engine_unavailable"), self._service.retry_after(now))
            return True
        if not live.admission.has_room(message.n, tokens):
            error = ApiError(429, "rate_limit_error", "queue_full", None, "the queue is full; try again later")
            self._refuse(tokenizer, message.sid, error, live.admission.retry_after(message.n))
            return True
        prompt = live.journal.open(message, ids, keys, tokenizer, now)
        live.admission.take(message.n, tokens)
        if not self._place(prompt, now):
            self._refuse(tokenizer, message.sid, failure("engine_unavailable"), self._service.retry_after(now))
        elif prompt.deadline:
            self._watch(prompt)
        return True

    def _refuse(self, tokenizer: Tokenizer, sid: int, error: ApiError, retry_after: int = 0) -> None:
        self._live.totals.refused[error.code or ""] += 1
        tokenizer.tell(
            Rejected(rid_of(sid), error.status, error.type, error.code, error.param, error.message, retry_after)
        )

    def _place(self, prompt: Prompt, now: float) -> bool:
        """Give all sequences of a prompt to one rank. False: no rank takes them, nothing of them is left."""
        live, submit = self._live, prompt.submit
        wanted = Wanted(
            tenant=submit.tenant,
            keys=prompt.keys,
            prompt_tokens=prompt.tokens,
            max_tokens=submit.params.max_tokens,
            session_key=submit.session_key,
            user=submit.user,
            first_hash=submit.first_hash,
            n=submit.n,
            prefix_cache=submit.params.prefix_cache,
        )
        avoid: list[int] = []
        while (choice := live.placement.choose(wanted, avoid)) is not None:
            rank = live.ranks[choice.rank]
            first = prompt.live[0]
            if self._send(first, rank):
                return self._go_on(prompt, wanted, choice, rank, now)
            avoid.append(choice.rank)
        for sequence in list(prompt.live):
            live.release(sequence, State.FAILED, now)
        return False

    def _send(self, sequence: Sequence, rank: Rank) -> bool:
        peer = rank.peer
        if peer is None:
            return False
        submit, frames = rebuild(sequence)
        if self._listener.send(peer, submit, *frames):
            return True
        if peer.gone:
            self._on_gone(rank)
        return False

    def _go_on(self, prompt: Prompt, wanted: Wanted, choice: Choice, rank: Rank, now: float) -> bool:
        """The first sequence is on its way: count all of them, and send the others after it."""
        live = self._live
        shares = live.placement.dispatched(wanted, choice)
        live.totals.routed[choice.reason] += 1
        sequences = list(prompt.live)
        for sequence, share in zip(sequences, shares, strict=True):
            sequence.share, sequence.reason = share, choice.reason
        for number, sequence in enumerate(sequences):
            if number and not self._send(sequence, rank):
                # Its queue is full in the middle of the request: what is there already is called back.
                for other in sequences[number:]:
                    live.release(other, State.FAILED, now)
                sent = [other for other in sequences[:number] if other.rank is not None and other.sid in rank.sequences]
                for other in sent:
                    other.told = True
                live.abort(sent, "admin")
                return False
            sequence.rank = rank
            sequence.generation = 0 if rank.peer is None else rank.peer.generation
            rank.sequences[sequence.sid] = sequence
            sequence.move(State.QUEUED)
        return True

    # --- answers --------------------------------------------------------------------------------------------------

    def accepted(self, rank: Rank, message: Accepted) -> bool:
        """A rank has sequences in its queue: say so, with the rank and why. False for a message that is no good."""
        if len(message.sids) != len(message.attempts):
            return False
        found = []
        for sid, attempt in zip(message.sids, message.attempts, strict=True):
            sequence = self._live.journal.sequences.get(sid)
            if sequence is None or sequence.attempt != attempt or sequence.rank is not rank:
                self._live.totals.stale_outputs += 1
            elif sequence.state is State.QUEUED:
                found.append(sequence)
        self.accept(found)
        return True

    def accept(self, sequences: list[Sequence]) -> None:
        """These sequences are in the queue of their rank."""
        groups: dict[tuple[int, str], list[Sequence]] = {}
        for sequence in sequences:
            sequence.move(State.PREFILL)
            if not sequence.told:
                sequence.accepted = True
                groups.setdefault((id(sequence.tokenizer), sequence.reason), []).append(sequence)
        for (_, reason), group in groups.items():
            rank = group[0].rank
            group[0].tokenizer.tell(
                Accepted(
                    sids=[sequence.sid for sequence in group],
                    attempts=[sequence.attempt for sequence in group],
                    rank=-1 if rank is None else rank.index,
                    reason=reason,
                )
            )

    def rejected(self, rank: Rank, message: Rejected, now: float) -> None:
        """A rank refuses a request: it ends here as well."""
        rid = rid_of(message.rid)
        found = [sequence for sid, sequence in list(rank.sequences.items()) if rid_of(sid) == rid]
        if found and not all(sequence.told for sequence in found):
            self._live.totals.refused[message.code if message.code in FAILURES else "other"] += 1
            found[0].tokenizer.tell(
                Rejected(
                    rid, message.status, message.type, message.code, message.param, message.text, message.retry_after
                )
            )
        for sequence in found:
            sequence.told = True
            self._live.release(sequence, State.FAILED, now)

    # --- ends that the router decides -----------------------------------------------------------------------------

    def fail(self, sequences: list[Sequence], code: str, now: float) -> None:
        """Tell tokenizers the end of sequences, once each: the whole request is refused if one was not accepted yet."""
        error = failure(code)
        refused: set[int] = set()
        for sequence in sequences:
            rid = rid_of(sequence.sid)
            if not sequence.told and not sequence.accepted and rid not in refused:
                refused.add(rid)
                retry = self._service.retry_after(now) if error.status == 503 else 0
                self._refuse(sequence.tokenizer, sequence.sid, error, retry)
        for sequence in sequences:
            if not sequence.told and rid_of(sequence.sid) not in refused:
                usage = sequence.usage or Usage(sequence.prompt.tokens)
                end = Finished(sequence.sid, sequence.attempt, "error", len(sequence.produced), usage, code)
                sequence.tokenizer.finished.append(end)
            sequence.told, sequence.flowing = True, False

    def next_deadline(self) -> float:
        """Monotonic seconds; infinite when no request has one."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def _watch(self, prompt: Prompt) -> None:
        heap, submit, known = self._deadlines, prompt.submit, self._live.journal.sequences
        if len(heap) > 2 * len(known) + MIN_DEADLINES:  # most of them are of requests that have ended
            heap[:] = [item for item in heap if any(sid in known for sid in range(item[1], item[1] + item[2]))]
            heapq.heapify(heap)
        heapq.heappush(heap, (prompt.deadline, submit.sid, submit.n))

    def expire(self, now: float) -> None:
        """End the requests whose own time has passed."""
        known = self._live.journal.sequences
        while self._deadlines and self._deadlines[0][0] <= now:
            _, first, n = heapq.heappop(self._deadlines)
            found = [known[sid] for sid in range(first, first + n) if sid in known]
            late = [sequence for sequence in found if not sequence.told and not sequence.aborting]
            self.fail(late, "request_timeout", now)
            self._live.abort(late, "deadline")
