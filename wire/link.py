"""Links between processes: a ROUTER that listens, DEALERs that dial, a hello, sessions, and sequence numbers.

Every send is checked and never blocks: `send` returns False when the peer is gone or its queue is full, and the
caller decides what that means. Frame 0 of each message is `<QI` (session, sequence number) followed by the msgpack
of a `wire.messages` type; further frames are raw. A listener's session is drawn per peer at its hello, so messages
meant for a listener that has restarted since are dropped; a listener addresses a dialer by its generation.
A frame that does not decode, or comes without the session, is counted and dropped, never fatal.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq

from wire.messages import (
    PROTOCOL_VERSION,
    EngineInfo,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Welcome,
    Who,
    decoder,
    encoder,
)

HEADER = struct.Struct("<QI")
HIGH_WATER = 4096
MAX_MESSAGE_BYTES = 256 << 20
MAX_SOCKET_PATH = 107
BEAT_SUFFIX = b".beat"
BEAT_SECONDS = 1.0
HELLO_AGAIN_SECONDS = 1.0

log = logging.getLogger("deepinfer.wire")


@dataclass(slots=True)
class LinkCounters:
    """What went wrong on a process's links; named as in /metrics."""

    bad_messages: int = 0
    gaps: int = 0
    stale: int = 0
    send_failures: int = 0


@dataclass(slots=True)
class Peer:
    """One dialer known to a listener. `name` is role.index, `identity` its ZeroMQ routing id."""

    role: str
    index: int
    generation: int
    identity: bytes
    session: int
    pid: int
    engine: EngineInfo | None = None
    received: int = 0  # sequence number of the last message from it
    sent: int = 0
    last_heard: float = 0.0
    gone: bool = False  # a send found nobody there (a queue that is full is not that)
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"


def _pack(session: int, sequence: int, message: Message) -> bytes:
    return HEADER.pack(session, sequence & 0xFFFFFFFF) + encoder.encode(message)


def _advance(counters: LinkCounters, who: str, received: int, sequence: int) -> int:
    if sequence != (received + 1) & 0xFFFFFFFF:
        counters.gaps += 1
        log.error("gap on the link from %s: expected %d, got %d", who, received + 1, sequence)
    return sequence


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


class Listener:
    """The bound end. `drain()` yields (peer, message, frames); a new or returning peer comes with its Hello.

    `welcome(peer)` is called for an accepted hello and gives the reply; it may raise ValueError to refuse it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        path: str,
        role: str,
        generation: int,
        secret: bytes,
        welcome: Callable[[Peer], Welcome],
    ) -> None:
        if len(path.encode()) > MAX_SOCKET_PATH:
            raise ValueError(
                f"socket path is {len(path.encode())} bytes, at most {MAX_SOCKET_PATH} are allowed: {path}"
            )
        self.socket = context.socket(zmq.ROUTER)
        _limit(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(f"ipc://{path}")
        self.role, self.generation = role, generation
        self.peers: dict[bytes, Peer] = {}
        self.by_name: dict[str, Peer] = {}
        self.counters = LinkCounters()
        self._secret, self._welcome = secret, welcome

    def send(self, peer: Peer, message: Message, *frames: bytes | memoryview) -> bool:
        """True when the message is in the peer's queue; False when the peer is gone or its queue is full."""
        parts = [peer.identity, _pack(peer.session, peer.sent + 1, message), *frames]
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counters.send_failures += 1
            peer.gone = error.errno == zmq.EHOSTUNREACH
            return False
        peer.sent += 1
        return True

    def drain(self, now: float, limit: int = 1000) -> Iterator[tuple[Peer, Message, list[bytes]]]:
        """All messages that are here, at most `limit`. `now` (monotonic seconds) stamps the peers heard from."""
        receive = self.socket.recv_multipart
        for _ in range(limit):
            try:
                identity, *frames = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (got := self._accept(identity, frames, now)) is not None:
                yield got

    def _accept(self, identity: bytes, frames: list[bytes], now: float) -> tuple[Peer, Message, list[bytes]] | None:
        try:
            session, sequence = HEADER.unpack_from(frames[0])
            message = decoder.decode(memoryview(frames[0])[HEADER.size :])
        except (IndexError, struct.error, msgspec.MsgspecError, UnicodeDecodeError):
            self.counters.bad_messages += 1
            return None
        if isinstance(message, Hello):
            peer = self._greet(identity, message, session, sequence, now)
            return None if peer is None else (peer, message, [])
        if isinstance(message, Heartbeat):
            self._beat(identity, session, now)
            return None
        known = self.peers.get(identity)
        if known is None or session != known.session:
            self.counters.stale += 1
            if known is None:
                self._reply(identity, Who(self.generation))
            return None
        known.received = _advance(self.counters, known.name, known.received, sequence)
        known.last_heard = now
        return known, message, frames[1:]

    def _beat(self, identity: bytes, session: int, now: float) -> None:
        dialer = identity.removesuffix(BEAT_SUFFIX)
        peer = self.peers.get(dialer)
        if peer is None:  # forgotten, or from before a restart: one that has nothing to send learns of it here
            self._reply(dialer, Who(self.generation))
        elif peer.session == session:
            peer.last_heard = now

    def _greet(self, identity: bytes, hello: Hello, session: int, sequence: int, now: float) -> Peer | None:
        expected = f"{hello.role}.{hello.index}.{hello.generation}".encode()
        if not hmac.compare_digest(hello.secret, self._secret) or identity != expected:
            self.counters.bad_messages += 1
            log.warning("refused a hello without the session secret")
            return None
        if hello.version != PROTOCOL_VERSION:
            self._reply(identity, Refused(f"protocol version {hello.version}, this side speaks {PROTOCOL_VERSION}"))
            return None
        # A repeated hello of the same process keeps its session: messages on their way stay valid.
        peer = self.peers.get(identity) or Peer(
            hello.role, hello.index, hello.generation, identity, secrets.randbits(63) | 1, hello.pid
        )
        peer.engine, peer.last_heard = hello.engine, now
        if session == peer.session:
            peer.received = sequence
        try:
            reply = self._welcome(peer)
        except ValueError as error:
            self._reply(identity, Refused(str(error)))
            self.forget(peer)
            return None
        reply.session = peer.session
        if (older := self.by_name.get(peer.name)) is not None and older is not peer:
            self.peers.pop(older.identity, None)
        self.peers[identity] = self.by_name[peer.name] = peer
        return peer if self.send(peer, reply) else None

    def _reply(self, identity: bytes, message: Message) -> None:
        try:
            self.socket.send_multipart([identity, _pack(0, 0, message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counters.send_failures += 1

    def forget(self, peer: Peer) -> None:
        """Drop a peer that is lost; its later messages are answered with `Who`."""
        self.peers.pop(peer.identity, None)
        if self.by_name.get(peer.name) is peer:
            del self.by_name[peer.name]

    def close(self) -> None:
        self.socket.close(0)


class Dialer:
    """The connecting end. Says hello at once, again when asked; `ready` once welcomed by the listener.

    `drain()` yields (message, frames). The `Welcome` of a new listener generation is yielded too: whatever was under
    way with the former generation is over then.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        path: str,
        hello: Hello,
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        _limit(self.socket)
        self._hello = hello
        self.socket.setsockopt(zmq.IDENTITY, self.identity)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self.socket.connect(f"ipc://{path}")
        self.counters = LinkCounters()
        self.peer_generation = 0
        self.last_heard = 0.0
        self.path = path
        self._session, self._sent, self._received = 0, 0, 0
        self._said_hello, self._asked_by = 0.0, 0
        self.greet()

    @property
    def ready(self) -> bool:
        return self._session != 0

    @property
    def session(self) -> int:
        return self._session

    @property
    def identity(self) -> bytes:
        return f"{self._hello.role}.{self._hello.index}.{self._hello.generation}".encode()

    def greet(self, engine: EngineInfo | None = None) -> None:
        """Say hello (again). `engine` replaces what the first hello told. Repeated each second until welcomed."""
        if engine is not None:
            self._hello.engine = engine
        self._said_hello = time.monotonic()
        self._put(self._hello, ())

    def redial(self) -> None:
        """The listener's process is known to be dead: greet its successor, without waiting to be asked."""
        self._session = 0
        self.greet()

    def _put(self, message: Message, frames: tuple[bytes | memoryview, ...]) -> bool:
        try:
            self.socket.send_multipart([_pack(self._session, self._sent + 1, message), *frames], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.counters.send_failures += 1
            return False
        self._sent += 1
        return True

    def send(self, message: Message, *frames: bytes | memoryview) -> bool:
        """True when the message is in the queue of a welcomed link; else False and nothing was sent."""
        if not self._session:
            self.counters.send_failures += 1
            return False
        return self._put(message, frames)

    def drain(self, now: float, limit: int = 1000) -> Iterator[tuple[Message, list[bytes]]]:
        """All messages that are here, at most `limit`. `now` is monotonic seconds."""
        receive = self.socket.recv_multipart
        if not self._session and now - self._said_hello > HELLO_AGAIN_SECONDS:
            self.greet()
        for _ in range(limit):
            try:
                frames = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                session, sequence = HEADER.unpack_from(frames[0])
                message = decoder.decode(memoryview(frames[0])[HEADER.size :])
            except (IndexError, struct.error, msgspec.MsgspecError, UnicodeDecodeError):
                self.counters.bad_messages += 1
                continue
            self.last_heard = now
            if isinstance(message, Who):
                # Each of our messages to a listener that has restarted is answered so: one hello is enough.
                if message.generation != self._asked_by:
                    self._asked_by, self._session = message.generation, 0
                    self.greet()
                continue
            if isinstance(message, Welcome):
                self._received, self._asked_by = sequence, 0
                if message.session == self._session:
                    continue
                self._session, self._sent = message.session, 0
                self.peer_generation = message.generation
            elif isinstance(message, Refused):
                yield message, frames[1:]
                continue
            elif session != self._session:
                self.counters.stale += 1
                continue
            else:
                self._received = _advance(self.counters, "the listener", self._received, sequence)
            yield message, frames[1:]

    def close(self) -> None:
        self.socket.close(0)


class Beat(threading.Thread):
    """Sends a heartbeat for a dialer each second over a socket of its own, so that a long step is not a silence."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], dialer: Dialer, generation: int) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._context, self._dialer, self._generation = context, dialer, generation
        self._ending = threading.Event()

    def run(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        _limit(socket)
        socket.setsockopt(zmq.IDENTITY, self._dialer.identity + BEAT_SUFFIX)
        socket.connect(f"ipc://{self._dialer.path}")
        while not self._ending.wait(BEAT_SECONDS):
            try:
                socket.send(_pack(self._dialer.session, 0, Heartbeat(self._generation)), zmq.NOBLOCK)
            except zmq.Again:
                self._dialer.counters.send_failures += 1
        socket.close(0)

    def stop(self) -> None:
        self._ending.set()
        self.join()
