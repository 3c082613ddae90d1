"""Messages to frontends: merged per peer, kept while a peer's queue is full, and bounded."""

from __future__ import annotations

from collections import defaultdict

from wire.link import Listener, Peer
from wire.messages import Message, TextDelta, TextOutput

MAX_KEPT_DELTAS = 200_000
MAX_KEPT_CHARS = 64 << 20


class Outbox:
    """Deltas go out in `flush`, one message per peer. Other messages go at once, after the deltas before them."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._deltas: defaultdict[bytes, list[TextDelta]] = defaultdict(list)
        self._others: defaultdict[bytes, list[Message]] = defaultdict(list)
        self.full: list[Peer] = []  # peers that have taken nothing for too long: they are lost

    def put(self, peer: Peer, delta: TextDelta) -> None:
        self._deltas[peer.identity].append(delta)

    def tell(self, peer: Peer, message: Message) -> None:
        """An `Accepted` or `Rejected`: deltas of what it accepts never come before it."""
        self._flush_peer(peer)
        if self._deltas.get(peer.identity) or not self._listener.send(peer, message):
            self._others[peer.identity].append(message)

    def flush(self) -> None:
        """Send what there is; what a peer cannot take stays and is merged into its next message."""
        for identity in list(self._deltas.keys() | self._others.keys()):
            peer = self._listener.peers.get(identity)
            if peer is None:
                self.drop(identity)
            else:
                self._flush_peer(peer)

    def drop(self, identity: bytes) -> None:
        """Forget what is meant for a peer that is gone."""
        self._deltas.pop(identity, None)
        self._others.pop(identity, None)

    @property
    def waiting(self) -> bool:
        return bool(self._deltas or self._others)

    def _flush_peer(self, peer: Peer) -> None:
        identity = peer.identity
        others = self._others.get(identity)
        while others and self._listener.send(peer, others[0]):
            del others[0]
        if others:
            self._bound(peer)
            return
        self._others.pop(identity, None)
        deltas = self._deltas.get(identity)
        if not deltas:
            self._deltas.pop(identity, None)
        elif self._listener.send(peer, TextOutput(deltas)):
            del self._deltas[identity]
        else:
            self._bound(peer)

    def _bound(self, peer: Peer) -> None:
        deltas = self._deltas.get(peer.identity, [])
        if len(deltas) > MAX_KEPT_DELTAS or sum(len(delta.text) for delta in deltas) > MAX_KEPT_CHARS:
            self.full.append(peer)
