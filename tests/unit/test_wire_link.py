"""The laws of a link: only who knows the secret and speaks the version gets in; every send is checked and none waits;
what does not decode, is stale or is missing is counted and never fatal; a restart on either side is noticed.
"""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.unit.test_wire_golden import Trap
from tests.unit.wire_samples import ENGINE, samples
from wire.link import HEADER, HIGH_WATER, MAX_SOCKET_PATH, Beat, Dialer, Listener, Peer
from wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Heartbeat,
    Hello,
    Message,
    MetricsQuery,
    Refused,
    ServiceStatus,
    StepOutput,
    Submit,
    TextDelta,
    TextOutput,
    Welcome,
    Who,
    encoder,
)

SECRET = b"0123456789abcdef"
WAIT_SECONDS = 10.0


class Pair:
    """A listener and a dialer in one process. `at_listener` and `at_dialer` collect what arrives."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.path = f"{folder}/l.sock"
        self.welcome: Callable[[Peer], Welcome] = lambda _: Welcome(
            PROTOCOL_VERSION, "router", self.listener.generation, 0
        )
        self.listener = self.listen(1)
        self.at_listener: list[tuple[Peer, Message, list[bytes]]] = []
        self.at_dialer: list[tuple[Message, list[bytes]]] = []
        self.dialer = self.dial()
        self.until(lambda: self.dialer.ready, "the hello is answered")

    def listen(self, generation: int) -> Listener:
        return Listener(self.context, self.path, "router", generation, SECRET, self._answer)

    def _answer(self, peer: Peer) -> Welcome:
        return self.welcome(peer)

    def dial(self, generation: int = 5, secret: bytes = SECRET, version: int = PROTOCOL_VERSION) -> Dialer:
        return Dialer(self.context, self.path, Hello(version, "engine", 0, generation, secret, os.getpid()))

    @property
    def peer(self) -> Peer:
        return self.listener.by_name["engine.0"]

    def turn(self, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        self.at_listener += self.listener.drain(now)
        self.at_dialer += self.dialer.drain(now)

    def until(self, done: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        poller = zmq.Poller()
        poller.register(self.listener.socket, zmq.POLLIN)
        poller.register(self.dialer.socket, zmq.POLLIN)
        while not done():
            assert time.monotonic() < deadline, what
            poller.poll(5)
            self.turn()

    def raw(self, identity: bytes = b"stranger") -> zmq.Socket[bytes]:
        """A bare socket to the listener."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{self.path}")
        return socket

    def works(self) -> None:
        """Both directions still carry messages."""
        before = len(self.at_listener), len(self.at_dialer)
        assert self.dialer.send(MetricsQuery(1, "json"), b"frame")
        self.until(lambda: len(self.at_listener) > before[0], "a message to the listener")
        assert self.at_listener[-1][1:] == (MetricsQuery(1, "json"), [b"frame"])
        assert self.listener.send(self.peer, Abort([1], "admin"), b"a", memoryview(b"bc"))
        self.until(lambda: len(self.at_dialer) > before[1], "a message to the dialer")
        assert self.at_dialer[-1] == (Abort([1], "admin"), [b"a", b"bc"])

    def close(self) -> None:
        self.dialer.close()
        self.listener.close()
        self.context.destroy(0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path)
    yield found
    found.close()


# --- who gets in ------------------------------------------------------------------------------------------------------


def test_a_hello_brings_a_session_in_both_directions(pair: Pair) -> None:
    hello = pair.at_listener[0][1]
    assert isinstance(hello, Hello)
    assert [type(message) for message, _ in pair.at_dialer] == [Welcome]
    assert pair.peer.name == "engine.0"
    assert pair.peer.session == pair.dialer.session != 0
    assert pair.dialer.peer_generation == 1
    pair.works()
    assert pair.listener.counters.gaps == pair.dialer.counters.gaps == 0


@pytest.mark.parametrize("secret", [b"", b"wrong", SECRET + b"x", SECRET[:-1]])
def test_85_a_hello_without_the_secret_is_refused_and_counted(pair: Pair, secret: bytes) -> None:
    stranger = pair.dial(6, secret)
    pair.until(lambda: pair.listener.counters.bad_messages == 1, "it is counted")
    assert not stranger.send(MetricsQuery(1, "json")), "nothing can be sent over it"
    list(stranger.drain(time.monotonic()))
    assert not stranger.ready
    assert list(pair.listener.peers) == [pair.peer.identity]
    stranger.close()
    pair.works()


def test_a_hello_for_somebody_else_is_refused_and_counted(pair: Pair) -> None:
    socket = pair.raw(b"engine.0.99")
    hello = Hello(PROTOCOL_VERSION, "engine", 0, 98, SECRET, 1)
    socket.send(HEADER.pack(0, 1) + encoder.encode(hello))
    pair.until(lambda: pair.listener.counters.bad_messages == 1, "it is counted")
    assert len(pair.listener.peers) == 1
    socket.close(0)


def test_another_version_is_refused_by_name(pair: Pair) -> None:
    other = pair.dial(6, version=PROTOCOL_VERSION + 1)
    got: list[Message] = []

    def refused() -> bool:
        got.extend(message for message, _ in other.drain(time.monotonic()))
        return any(isinstance(message, Refused) for message in got)

    pair.until(refused, "a refusal")
    reason = next(message.reason for message in got if isinstance(message, Refused))
    assert str(PROTOCOL_VERSION) in reason
    assert str(PROTOCOL_VERSION + 1) in reason
    assert not other.ready
    other.close()


def test_the_owner_of_a_listener_may_refuse_with_a_reason(pair: Pair) -> None:
    def refuse(peer: Peer) -> Welcome:
        raise ValueError(f"there is no place for {peer.name}")

    pair.welcome = refuse
    other = pair.dial(6)
    got: list[Message] = []

    def refused() -> bool:
        got.extend(message for message, _ in other.drain(time.monotonic()))
        return Refused("there is no place for engine.0") in got

    pair.until(refused, "a refusal")
    assert not other.ready
    other.close()


def test_a_repeated_hello_keeps_the_session(pair: Pair) -> None:
    session = pair.dialer.session
    pair.works()
    pair.dialer.greet(ENGINE)
    pair.until(lambda: pair.peer.engine is not None, "the engine's words")
    assert pair.peer.engine == ENGINE
    assert pair.peer.session == pair.dialer.session == session
    pair.works()
    assert pair.listener.counters.gaps == pair.listener.counters.stale == pair.dialer.counters.gaps == 0


def test_a_path_that_a_socket_cannot_have_is_refused_by_its_length(tmp_path: Path) -> None:
    path = f"{tmp_path}/{'x' * MAX_SOCKET_PATH}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(ValueError, match=f"{len(path)} bytes"):
        Listener(context, path, "router", 1, SECRET, lambda _: Welcome(1, "router", 1, 0))
    context.destroy(0)


# --- what is no message -----------------------------------------------------------------------------------------------


def rubbish(trap: bytes) -> list[list[bytes]]:
    """Messages that nobody sends: random, cut, empty, and pickles in every place."""
    source = random.Random(4)
    found = [[source.randbytes(source.randrange(0, 60))] for _ in range(200)]
    for sample in samples():
        raw = HEADER.pack(0, 1) + encoder.encode(sample)
        found += [[raw[:cut]] for cut in (0, 1, HEADER.size - 1, HEADER.size, len(raw) // 2, len(raw) - 1)]
    found += [[b""], [trap], [HEADER.pack(0, 1) + trap], [HEADER.pack(0, 1) + b"\x91\xa5Hello", trap]]
    return found


def test_84_what_does_not_decode_is_counted_and_never_fatal(pair: Pair, tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "canary"))
    wrong = rubbish(trap)
    socket = pair.raw()
    for frames in wrong:
        socket.send_multipart(frames)
    pair.until(lambda: pair.listener.counters.bad_messages >= len(wrong), "all of it is counted")
    assert pair.listener.counters.bad_messages == len(wrong)
    socket.close(0)
    listener = pair.listener
    for frames in wrong:
        listener.socket.send_multipart([pair.peer.identity, *frames])
    pair.until(lambda: pair.dialer.counters.bad_messages >= len(wrong), "all of it is counted")
    assert pair.dialer.counters.bad_messages == len(wrong)
    assert not (tmp_path / "canary").exists()
    pair.works()


def test_84_pickles_in_bytes_fields_and_frames_are_carried_as_bytes(pair: Pair, tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "canary"))
    params = next(sample.params for sample in samples() if isinstance(sample, Submit))
    assert pair.dialer.send(Submit(256, 0, 1, "", params, first_hash=trap, render_context=trap), trap, trap)
    assert pair.dialer.send(StepOutput([], [], [], []), trap)
    assert pair.dialer.send(TextOutput([TextDelta(256, 0, "", 0, logprobs=trap)]))
    pair.until(lambda: len(pair.at_listener) >= 4, "they arrive")
    submit = pair.at_listener[1]
    assert submit[2] == [trap, trap]
    assert isinstance(submit[1], Submit)
    assert submit[1].render_context == trap
    stranger = pair.dial(6, trap)
    pair.until(lambda: pair.listener.counters.bad_messages == 1, "a pickle is no secret")
    stranger.close()
    assert not (tmp_path / "canary").exists()


def test_a_message_before_the_hello_is_dropped_and_asked_who(pair: Pair) -> None:
    socket = pair.raw()
    socket.send(HEADER.pack(0, 1) + encoder.encode(Abort([1], "client")))
    pair.until(lambda: pair.listener.counters.stale == 1, "it is counted")
    assert len(pair.at_listener) == 1  # only the hello of the pair's own dialer
    assert socket.poll(5000)
    assert socket.recv()[HEADER.size :] == encoder.encode(Who(1))
    socket.close(0)


def test_a_message_with_another_session_is_dropped_and_counted(pair: Pair) -> None:
    pair.dialer._session += 1
    assert pair.dialer.send(Abort([1], "client"))
    pair.until(lambda: pair.listener.counters.stale == 1, "it is counted")
    assert len(pair.at_listener) == 1


# --- order, gaps, room ------------------------------------------------------------------------------------------------


def test_messages_keep_their_order(pair: Pair) -> None:
    count, sent = 5000, 0
    while sent < count:
        while sent < count and pair.dialer.send(MetricsQuery(sent, "json")):
            sent += 1
        pair.turn()
    pair.until(lambda: len(pair.at_listener) == count + 1, "all of them")
    assert [item[1].query for item in pair.at_listener[1:]] == list(range(count))  # type: ignore[attr-defined]
    assert pair.listener.counters.gaps == 0


def test_42_a_gap_is_counted_in_both_directions(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.works()
    pair.dialer._sent += 2
    pair.works()
    assert pair.listener.counters.gaps == 1
    assert "gap on the link from engine.0" in caplog.text
    pair.peer.sent += 1
    pair.works()
    assert pair.dialer.counters.gaps == 1
    pair.works()
    assert (pair.listener.counters.gaps, pair.dialer.counters.gaps) == (1, 1)


def test_sequence_numbers_wrap_around(pair: Pair) -> None:
    pair.dialer._sent = pair.peer.received = 0xFFFF_FFFE
    for _ in range(4):
        pair.works()
    assert pair.listener.counters.gaps == 0


def test_42_a_send_to_a_peer_that_is_gone_fails_at_once(pair: Pair) -> None:
    peer = pair.peer
    pair.dialer.close()
    deadline = time.monotonic() + WAIT_SECONDS
    while pair.listener.send(peer, Abort([1], "admin")):
        assert time.monotonic() < deadline
        pair.listener.socket.poll(1)
    started = time.perf_counter()
    assert not pair.listener.send(peer, Abort([1], "admin"))
    assert time.perf_counter() - started < 0.1
    assert peer.gone
    assert pair.listener.counters.send_failures >= 2
    pair.dialer = pair.dial(6)
    pair.until(lambda: pair.dialer.ready, "a new one is welcomed")
    pair.works()


def test_42_a_send_into_a_full_queue_fails_at_once(pair: Pair) -> None:
    sent, slowest = 0, 0.0
    while True:
        started = time.perf_counter()
        taken = pair.listener.send(pair.peer, Abort([sent], "admin"))
        slowest = max(slowest, time.perf_counter() - started)
        if not taken:
            break
        sent += 1
    assert HIGH_WATER <= sent <= 3 * HIGH_WATER
    assert slowest < 0.5
    assert not pair.peer.gone, "it is there, only slow"
    pair.until(lambda: len(pair.at_dialer) == sent + 1, "everything that was taken arrives")
    assert [item[0].sids for item in pair.at_dialer[1:]] == [[i] for i in range(sent)]  # type: ignore[attr-defined]
    pair.works()
    assert pair.dialer.counters.gaps == 0, "a send that failed leaves no gap"


def test_a_dialer_without_a_listener_takes_nothing(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dialer = Dialer(context, f"{tmp_path}/none.sock", Hello(PROTOCOL_VERSION, "engine", 0, 5, SECRET, 1))
    assert not dialer.send(Abort([1], "client"))
    assert dialer.counters.send_failures == 1
    dialer.close()
    context.destroy(0)


# --- restarts ---------------------------------------------------------------------------------------------------------


def talk_until_welcomed(pair: Pair, generation: int) -> None:
    """Messages for the former listener, until the new one has answered (those in a dying pipe are lost on the way)."""

    def welcomed() -> bool:
        if pair.dialer.peer_generation == generation:
            return True
        pair.dialer.send(Abort([1], "client"))
        return False

    pair.until(welcomed, "the new generation's welcome")


def test_a_restarted_listener_asks_who_and_gets_a_hello(pair: Pair) -> None:
    old = pair.dialer.session
    pair.listener.close()
    pair.at_listener.clear()
    pair.listener = pair.listen(2)
    talk_until_welcomed(pair, 2)
    pair.until(lambda: len(pair.at_listener) == 1, "one hello")
    assert isinstance(pair.at_listener[0][1], Hello), "what was meant for the former listener is dropped"
    assert pair.listener.counters.stale >= 1
    assert pair.dialer.session not in (0, old)
    assert [type(message) for message, _ in pair.at_dialer] == [Welcome, Welcome]
    pair.works()
    assert pair.listener.counters.gaps == pair.dialer.counters.gaps == 0


def test_many_messages_to_a_restarted_listener_bring_one_hello(pair: Pair) -> None:
    pair.listener.close()
    pair.at_listener.clear()
    pair.listener = pair.listen(2)
    for number in range(20):
        assert pair.dialer.send(Abort([number], "client"))
    talk_until_welcomed(pair, 2)
    pair.works()
    assert sum(isinstance(message, Hello) for _, message, _ in pair.at_listener) == 1
    assert pair.listener.counters.stale >= 1


def test_a_dialer_that_knows_of_the_death_greets_the_next_listener_unasked(pair: Pair) -> None:
    pair.listener.close()
    pair.at_listener.clear()
    pair.dialer.redial()
    assert not pair.dialer.ready
    assert not pair.dialer.send(Abort([1], "client"))
    pair.listener = pair.listen(2)
    pair.until(lambda: pair.dialer.ready, "the next one's welcome")
    assert pair.dialer.peer_generation == 2
    pair.works()
    assert pair.listener.counters.gaps == pair.dialer.counters.gaps == 0


def test_messages_of_the_former_session_are_dropped_by_the_dialer(pair: Pair) -> None:
    peer, old = pair.peer, pair.peer.session
    pair.listener.forget(peer)
    assert pair.dialer.send(Abort([1], "client"))
    pair.until(lambda: pair.dialer.session not in (0, old), "a new session")
    assert pair.listener.send(peer, Abort([9], "admin")), "the former peer has the same address"
    pair.until(lambda: pair.dialer.counters.stale == 1, "it is counted")
    assert not any(isinstance(message, Abort) for message, _ in pair.at_dialer)
    pair.works()


def test_a_new_generation_takes_the_place_of_the_old_one(pair: Pair) -> None:
    old = pair.peer
    pair.dialer.close()
    pair.dialer = pair.dial(6)
    pair.until(lambda: pair.dialer.ready, "a welcome")
    assert pair.peer is not old
    assert pair.peer.generation == 6
    assert list(pair.listener.peers) == [pair.peer.identity]
    pair.works()


def test_a_listener_that_comes_late_is_found(tmp_path: Path) -> None:
    found = Pair.__new__(Pair)
    found.context, found.path = zmq.Context(), f"{tmp_path}/late.sock"
    found.at_listener, found.at_dialer = [], []
    found.welcome = lambda _: Welcome(PROTOCOL_VERSION, "router", 1, 0)
    found.dialer = found.dial()
    assert not list(found.dialer.drain(time.monotonic()))
    found.listener = found.listen(1)
    found.until(lambda: found.dialer.ready, "a welcome")
    found.works()
    found.close()


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_heartbeats_keep_a_silent_peer_heard(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.link.BEAT_SECONDS", 0.01)
    beat = Beat(pair.context, pair.dialer, 5)
    pair.peer.last_heard = 0.0
    beat.start()
    try:
        pair.until(lambda: pair.peer.last_heard > 0, "a heartbeat")
        assert [type(message) for _, message, _ in pair.at_listener] == [Hello], "nobody is told of heartbeats"
        assert pair.listener.counters.gaps == pair.listener.counters.stale == 0
    finally:
        beat.stop()


def test_a_heartbeat_with_another_session_counts_for_nothing(pair: Pair) -> None:
    pair.peer.last_heard = 0.0
    socket = pair.raw(pair.peer.identity + b".beat")
    socket.send(HEADER.pack(pair.peer.session + 1, 0) + encoder.encode(Heartbeat(5)))
    socket.send(HEADER.pack(0, 0) + encoder.encode(Hello(1, "engine", 9, 9, b"no", 1)))
    pair.until(lambda: pair.listener.counters.bad_messages == 1, "both were read")
    assert pair.peer.last_heard == 0.0
    socket.close(0)


def test_40_a_forgotten_peer_that_only_beats_says_hello_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.link.BEAT_SECONDS", 0.01)
    beat = Beat(pair.context, pair.dialer, 5)
    beat.start()
    try:
        old = pair.dialer.session
        pair.listener.forget(pair.peer)
        pair.until(lambda: pair.dialer.session not in (0, old), "a new session")
        assert isinstance(pair.at_dialer[-1][0], Welcome), "the dialer knows that everything before is over"
        pair.works()
    finally:
        beat.stop()


def test_status_is_carried_whole(pair: Pair) -> None:
    status = next(sample for sample in samples() if isinstance(sample, ServiceStatus))
    assert pair.listener.send(pair.peer, status)
    pair.until(lambda: len(pair.at_dialer) == 2, "the status")
    assert pair.at_dialer[-1] == (status, [])
