"""The tokenizer process: `python -m tokenizer_proc.main`, started by the launcher; its loop over all its links."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import zmq

from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.detokenize import Detokenizer
from tokenizer_proc.encode import Encoder
from tokenizer_proc.model_files import load_model_files
from tokenizer_proc.prepare import Preparer
from tokenizer_proc.service import Service
from tokenizer_proc.workers import Workers
from wire.child import Child, Control
from wire.link import Beat, Dialer, Listener, Peer
from wire.messages import PROTOCOL_VERSION, Hello, Refused, Stats, Welcome

TICK_SECONDS = 0.25
INBOX_SECONDS = 0.004  # how long new requests may keep text waiting
THREAD_SWITCH_SECONDS = 0.001  # workers hand the interpreter over to the loop this soon


class Tokenizer:
    """Links, service and loop of one process."""

    def __init__(self, config: TokenizerConfig, index: int, generation: int) -> None:
        """Read the model's files, check the tokenizer, open the links. Raises ValueError in one line."""
        files = load_model_files(Path(config.model_dir), config.chat_template)
        self.encoder = Encoder(files, config.segment_cache_tokens)
        self.detokenizer = Detokenizer(files.tokenizer, files.decoder)
        preparer = Preparer(config, files, self.encoder, self.detokenizer)
        self._name = f"tokenizer.{index}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        path = f"{config.run_dir}/{self._name}.sock"
        self.listener = Listener(self._context, path, "tokenizer", generation, config.secret, self._welcome)
        hello = Hello(PROTOCOL_VERSION, "tokenizer", index, generation, config.secret, os.getpid())
        self.router = Dialer(self._context, f"{config.run_dir}/router.sock", hello)
        self._beat = Beat(self._context, self.router, generation)
        self._beat.start()
        self._generation = generation
        self.workers = Workers(preparer.prepare)
        self.service = Service(self.listener, self.router, preparer, self.detokenizer, self.workers)
        self._poller = zmq.Poller()
        for source in (self.listener.socket, self.router.socket, self.workers.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._next_tick = 0.0
        self._sent: Stats | None = None
        self.refused = ""

    def watch(self, fd: int) -> None:
        """Wake up for another descriptor too."""
        self._poller.register(fd, zmq.POLLIN)

    def close(self) -> None:
        self.workers.close()
        self._beat.stop()
        self.listener.close()
        self.router.close()
        self._context.destroy(0)

    def _welcome(self, peer: Peer) -> Welcome:
        if peer.role != "frontend":
            raise ValueError(f"a tokenizer is dialled by frontends, not by a {peer.role}")
        status = self.service.status
        return Welcome(PROTOCOL_VERSION, "tokenizer", self._generation, 0, None if status is None else status.service)

    # --- loop -----------------------------------------------------------------------------------------------------

    def turn(self, timeout: float) -> None:
        """Wait at most `timeout` seconds, take everything that is there, send what follows from it."""
        service = self.service
        self._poller.poll(0 if service.inbox else int(1000 * min(timeout, TICK_SECONDS)))
        now = time.monotonic()
        self._read_router(now)
        self._read_frontends(now)
        service.flush(now)
        for request, outcome in self.workers.outcomes():
            service.on_outcome(request, outcome, now)
        while service.inbox and time.monotonic() - now < INBOX_SECONDS:
            service.start_next(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            service.tick(now)
            self._send_stats()
        service.flush(now)

    def _read_router(self, now: float) -> None:
        for message, frames in self.router.drain(now):
            if isinstance(message, Welcome):
                self.service.lose_router()  # whatever was under way with its former generation is over
                self._sent = None
            elif isinstance(message, Refused):
                self.refused = f"the router refused the link: {message.reason}"
            elif not self.service.on_router(message, frames, now):
                self.router.counters.bad_messages += 1

    def _read_frontends(self, now: float) -> None:
        for peer, message, frames in self.listener.drain(now):
            if isinstance(message, Hello):
                self._drop_former(peer)
            elif not self.service.on_frontend(peer, message, frames, now):
                self.listener.counters.bad_messages += 1

    def _drop_former(self, peer: Peer) -> None:
        """A frontend that starts anew: what its former process asked for is over."""
        peers = {request.peer.identity: request.peer for request in self.service.table.requests.values()}
        for other in peers.values():
            if other.name == peer.name and other is not peer:
                self.service.lose_frontend(other)

    def lost(self, control: Control) -> None:
        """The launcher says that a child died."""
        if control.role == "router":
            if self.router.peer_generation in (0, control.generation):
                self.service.status = None
                self.service.lose_router()
                self.router.redial()
        elif control.role == "frontend":
            peer = self.listener.by_name.get(f"frontend.{control.index}")
            if peer is not None and peer.generation == control.generation:
                self.service.lose_frontend(peer)
                self.listener.forget(peer)

    def _send_stats(self) -> None:
        service, counters = self.service, (self.listener.counters, self.router.counters)
        label = f'{{process="{self._name}"}}'
        cache = self.encoder.cache
        stats = Stats(
            counters={
                f"ipc_bad_messages_total{label}": float(sum(item.bad_messages for item in counters)),
                f"ipc_gaps_total{label}": float(sum(item.gaps for item in counters)),
                "tokenizer_late_outputs_total": float(service.late),
                "tokenizer_segment_hits_total": float(cache.hits),
                "tokenizer_segment_misses_total": float(cache.misses),
            },
            gauges={
                "tokenizer_live_requests": float(len(service.table.requests)),
                "tokenizer_segment_cache_tokens": float(cache.tokens),
            },
            histograms={},
        )
        if stats != self._sent and self.router.ready and self.router.send(stats):
            self._sent = stats


def run(child: Child) -> None:
    """Until the launcher says stop."""
    config = child.config(TokenizerConfig)
    child.phase("reading the tokenizer")
    try:
        tokenizer = Tokenizer(config, child.index, child.generation)
    except ValueError as error:
        child.fail(str(error))
    tokenizer.watch(child.fileno())
    child.ready(segments=tokenizer.encoder.segments, cuts=tokenizer.encoder.cuts, table=tokenizer.detokenizer.by_table)
    while not child.stopping:
        tokenizer.turn(TICK_SECONDS)
        for control in child.controls():
            if control.what == "lost":
                tokenizer.lost(control)
        if tokenizer.refused:
            child.fail(tokenizer.refused)
    tokenizer.close()


if __name__ == "__main__":
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    run(Child.start())
