"""The router: its peers, what each message does, losses, and the clock. Everything runs on one thread."""

from __future__ import annotations

import logging
import math
import time

import zmq

from router_proc.config import RouterConfig
from router_proc.dispatch import Dispatcher
from router_proc.journal import State
from router_proc.live import Live
from router_proc.metrics import Registry
from router_proc.outbox import Tokenizer
from router_proc.outputs import Outputs
from router_proc.pages import page
from router_proc.ranks import Rank, Service, disagreement
from wire.child import Control
from wire.link import Listener, Peer
from wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Hello,
    Hook,
    HookReply,
    Message,
    MetricsQuery,
    MetricsReply,
    Rejected,
    ServiceStatus,
    Stats,
    StepOutput,
    Submit,
    Welcome,
)

TICK_SECONDS = 0.25
STATUS_SECONDS = 1.0
DRAIN_LIMIT = 250  # messages until what follows from them is sent: a burst of requests must not hold up ids
MAX_HOOKS = 1024
ABORT_REASONS = frozenset({"client", "stop", "stall", "deadline", "shutdown", "admin"})
FORMS = ("prometheus", "json")

log = logging.getLogger("deepinfer.router")


class Router:
    """Links, live sequences and loop of the router process."""

    def __init__(self, config: RouterConfig, generation: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Raises ValueError or ZMQError when the socket cannot be made."""
        self.config = config
        self.live = Live(config)
        self.service = Service(self.live.ranks)
        path = f"{config.run_dir}/router.sock"
        self.listener = Listener(context, path, "router", generation, config.secret, self._welcome)
        self.dispatcher = Dispatcher(self.listener, self.live, self.service, self._lose_gone)
        self.outputs = Outputs(self.listener, self.live, self.dispatcher)
        self.tokenizers: dict[bytes, Tokenizer] = {}
        self.registry = Registry()
        self._generation = generation
        self._hooks: dict[int, tuple[Peer, int, int]] = {}  # query at the engine → frontend, its query, rank
        self._next_hook = 0
        self._gaps = 0
        self._next_tick = self._next_status = 0.0
        self._now = 0.0  # of the last step
        self._poller = zmq.Poller()
        self._poller.register(self.listener.socket, zmq.POLLIN)

    def watch(self, fd: int) -> None:
        """Wake up for another descriptor too."""
        self._poller.register(fd, zmq.POLLIN)

    def close(self) -> None:
        self.listener.close()

    # --- loop -----------------------------------------------------------------------------------------------------

    def turn(self, timeout: float) -> None:
        """Wait at most `timeout` seconds, take everything that is there, send what follows from it."""
        wait = min(timeout, TICK_SECONDS, self.dispatcher.next_deadline() - time.monotonic())
        self._poller.poll(max(0, math.ceil(1000 * wait)))
        self.step(time.monotonic())

    def step(self, now: float) -> None:
        """Take everything that is there at `now` (monotonic seconds), and send what follows from it."""
        self._now = now
        counters = self.listener.counters
        for peer, message, frames in self.listener.drain(now, DRAIN_LIMIT):
            if counters.gaps != self._gaps:
                self._gaps = counters.gaps
                if peer.role != "frontend":  # what is missing may be the end of a request: nobody must wait for it
                    self._lose(peer, "messages of it are missing")
                    continue
            if not self._handle(peer, message, frames, now):
                counters.bad_messages += 1
        self.dispatcher.expire(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)
        for rank in self.live.ranks:
            if rank.aborts:
                rank.send_aborts(self.listener)
        self.outputs.flush(list(self.tokenizers.values()), now)

    def _handle(self, peer: Peer, message: Message, frames: list[bytes], now: float) -> bool:
        """False for a message that this peer does not send, or that is no good."""
        if isinstance(message, Hello):
            self._on_hello(peer, now)
            return True
        if isinstance(message, Stats):
            return self.registry.put(peer.name, peer.identity, message)
        match peer.role:
            case "engine":
                return self._from_engine(self.live.ranks[peer.index], peer, message, frames, now)
            case "tokenizer":
                tokenizer = self.tokenizers.get(peer.identity)
                return tokenizer is not None and self._from_tokenizer(tokenizer, message, frames, now)
            case _:
                return self._from_frontend(peer, message)

    def _from_engine(self, rank: Rank, peer: Peer, message: Message, frames: list[bytes], now: float) -> bool:
        if rank.peer is not peer:
            return False
        match message:
            case StepOutput():
                return self.outputs.take(rank, message, frames, now)
            case Accepted():
                return self.dispatcher.accepted(rank, message)
            case Rejected():
                self.dispatcher.rejected(rank, message, now)
            case HookReply():
                if (asked := self._hooks.pop(message.query, None)) is not None:
                    self.listener.send(asked[0], HookReply(asked[1], message.ok, message.result))
            case _:
                return False
        return True

    def _from_tokenizer(self, tokenizer: Tokenizer, message: Message, frames: list[bytes], now: float) -> bool:
        match message:
            case Submit():
                return self.dispatcher.submit(tokenizer, message, frames, now)
            case Abort():
                if message.reason not in ABORT_REASONS:
                    return False
                known = self.live.journal.sequences
                self.live.abort([known[sid] for sid in message.sids if sid in known], message.reason)
            case _:
                return False
        return True

    def _from_frontend(self, peer: Peer, message: Message) -> bool:
        match message:
            case MetricsQuery():
                if message.form not in FORMS:
                    return False
                self.listener.send(peer, MetricsReply(message.query), page(message.form, self))
            case Hook():
                self._on_hook(peer, message)
            case _:
                return False
        return True

    def _on_hook(self, peer: Peer, message: Hook) -> None:
        rank = self.live.ranks[message.rank] if 0 <= message.rank < len(self.live.ranks) else None
        why = ""
        if not self.config.test_hooks:
            why = "test hooks are off"
        elif rank is None or rank.peer is None:
            why = f"rank {message.rank} is not there"
        elif len(self._hooks) >= MAX_HOOKS:
            why = "too many hooks are under way"
        else:
            self._next_hook += 1
            if self.listener.send(rank.peer, Hook(self._next_hook, message.rank, message.name, message.args)):
                self._hooks[self._next_hook] = (peer, message.query, message.rank)
                return
            why = f"rank {message.rank} takes no messages"
        self.listener.send(peer, HookReply(message.query, False, why))

    # --- peers ----------------------------------------------------------------------------------------------------

    def _welcome(self, peer: Peer) -> Welcome:
        """For an accepted hello. Raises ValueError for a peer that does not belong here."""
        config = self.config
        places = {"engine": config.ranks, "tokenizer": config.tokenizers, "frontend": config.frontends}
        if not 0 <= peer.index < places.get(peer.role, 0):
            raise ValueError(f"there is no place for {peer.name}")
        if peer.role == "engine" and peer.engine is not None:
            wrong = disagreement(peer.engine, peer.index, self.live.ranks)
            if wrong:
                log.error("%s", wrong)
                raise ValueError(wrong)
        return Welcome(PROTOCOL_VERSION, "router", self._generation, 0, self.service.info)

    def _on_hello(self, peer: Peer, now: float) -> None:
        if peer.role == "engine":
            rank = self.live.ranks[peer.index]
            if rank.peer is not None and rank.peer is not peer:
                self._lose(rank.peer, "its next process says hello")
            rank.peer = peer
            if rank.orphans and rank.orphans_of == peer.generation:  # the same process, after a silence
                rank.aborts["admin"] = rank.orphans
            rank.orphans = []
            if peer.engine is not None and not rank.ready:
                self._make_ready(rank, now)
        elif peer.role == "tokenizer":
            for other in list(self.tokenizers.values()):
                if other.peer.name == peer.name and other.peer is not peer:
                    self._lose(other.peer, "its next process says hello")
            if peer.identity not in self.tokenizers:
                self.tokenizers[peer.identity] = Tokenizer(peer)
        if peer.role != "engine":
            self._send_status(now)  # a tokenizer more may be what was missing

    def _make_ready(self, rank: Rank, now: float) -> None:
        """Its engine has told what it can do: into rotation, with nothing on it."""
        peer = rank.peer
        assert peer is not None and peer.engine is not None
        rank.info = info = peer.engine
        self.service.came_back(rank, now)
        self.live.placement.ready(rank.index, peer.generation, info.block_tokens, info.keep_tokens, info.pool_tokens)
        self._on_ranks_changed(now)
        log.info("rank %d is ready", rank.index)

    def _on_ranks_changed(self, now: float) -> None:
        self.live.admission.running_places = sum(
            rank.info.max_running for rank in self.live.ranks if rank.info is not None
        )
        self.service.update()
        self._send_status(now)

    def lost(self, control: Control) -> None:
        """The launcher says that a child died."""
        peer = self.listener.by_name.get(f"{control.role}.{control.index}")
        if peer is not None and peer.generation == control.generation:
            self._lose(peer, "its process has ended")

    def _lose_gone(self, rank: Rank) -> None:
        if rank.peer is not None:
            self._lose(rank.peer, "nobody is there")

    def _lose(self, peer: Peer, why: str) -> None:
        """A peer is lost, and with it what runs there. If its process still lives, it is told to start anew."""
        now = self._now
        log.log(self._loss_level(peer), "%s is lost: %s", peer.name, why)
        self.listener.forget(peer)
        self.registry.drop(peer.identity)
        if peer.role == "engine":
            rank = self.live.ranks[peer.index]
            if rank.peer is peer:
                self._lose_rank(rank, now)
        elif peer.role == "tokenizer":
            tokenizer = self.tokenizers.pop(peer.identity, None)
            theirs = [item for item in self.live.journal.sequences.values() if item.tokenizer is tokenizer]
            for sequence in theirs:
                sequence.told, sequence.flowing = True, False
            self.live.abort(theirs, "admin")
            self._next_status = 0.0  # told with the next tick
        for query, (frontend, _, _) in list(self._hooks.items()):
            if frontend is peer:
                del self._hooks[query]

    def _loss_level(self, peer: Peer) -> int:
        """How much it matters: an engine that was not ready has nothing, a frontend has only what is its own."""
        if peer.role == "engine" and not self.live.ranks[peer.index].ready:
            return logging.DEBUG
        return logging.INFO if peer.role == "frontend" else logging.WARNING

    def _lose_rank(self, rank: Rank, now: float) -> None:
        was_ready, generation = rank.ready, 0 if rank.peer is None else rank.peer.generation
        rank.peer = rank.info = None
        rank.aborts.clear()
        self.live.placement.lost(rank.index)
        sequences = list(rank.sequences.values())
        rank.orphans, rank.orphans_of = [sequence.sid for sequence in sequences], generation
        if was_ready:
            rank.lost_at = now
            self._on_ranks_changed(now)
        self.dispatcher.fail(sequences, "engine_unavailable", now)
        for sequence in sequences:
            self.live.release(sequence, State.FAILED, now)
        for query, (frontend, theirs, index) in list(self._hooks.items()):
            if index == rank.index:
                del self._hooks[query]
                self.listener.send(frontend, HookReply(theirs, False, f"rank {index} is lost"))

    # --- clock ----------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        silence = self.config.engine_silence_seconds
        for rank in self.live.ranks:
            peer = rank.peer
            if peer is None:
                continue
            if rank.ready and now - peer.last_heard > silence:
                self._lose(peer, f"it was silent for {silence:g} s")
            elif rank.sequences and self._is_gone(peer):
                self._lose(peer, "nobody is there")
        for tokenizer in list(self.tokenizers.values()):
            if tokenizer.blocked_since and now - tokenizer.blocked_since > silence:
                self._lose(tokenizer.peer, f"it took no messages for {silence:g} s")
        self.outputs.tick(now)
        if now >= self._next_status:
            self._send_status(now)

    def _is_gone(self, peer: Peer) -> bool:
        """An abort of nothing shows it: what was sent to a process that died just then will never be answered."""
        return not self.listener.send(peer, Abort([], "admin")) and peer.gone

    def status(self, now: float) -> ServiceStatus:
        """What this service can do now."""
        return self.service.status(now, len(self.tokenizers), self.config.tokenizers)

    def _send_status(self, now: float) -> None:
        """To all frontends and tokenizers. One that cannot take it now gets the next one."""
        self._next_status = now + STATUS_SECONDS
        status = self.status(now)
        for peer in list(self.listener.peers.values()):
            if peer.role != "engine" and not self.listener.send(peer, status) and peer.gone:
                self._lose(peer, "nobody is there")

    def check(self) -> None:
        """With no request under way: raises AssertionError when something is left."""
        self.live.check()
        assert not self._hooks, "hooks are left"
