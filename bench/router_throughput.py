"""What do ids and requests cost in the router? A synthetic feed over real links, the router's own CPU time only.

Pass lines: 64 streams with one id each per step at most 1.5 µs an id; a backlog merged at 1,000,000 ids/s or more.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from array import array

import zmq

from router_proc.config import RouterConfig
from router_proc.service import Router
from wire.link import Dialer
from wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    EngineInfo,
    Finished,
    Hello,
    Message,
    Params,
    RequestIds,
    StepOutput,
    Submit,
    Usage,
)

MAX_TOKENS = 1_000_000


def engine_info() -> EngineInfo:
    return EngineInfo("d" * 64, "f", 50_000, 1 << 20, 1 << 20, 1 << 24, 128, 1, [2], 64, "fp32", "cpu")


def params() -> Params:
    return Params(0.0, 1.0, -1, 0.0, 0.0, 0.0, 1.0, 1, MAX_TOKENS)


class Feed:
    """A router in this process, an engine and a tokenizer around it; `spent` sums the router's time only."""

    def __init__(self, folder: str) -> None:
        secret = secrets.token_bytes(16)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = Router(RouterConfig(folder, secret, 1, 1, 1), 1, self.context)

        def dial(role: str, info: EngineInfo | None = None) -> Dialer:
            return Dialer(self.context, f"{folder}/router.sock", Hello(PROTOCOL_VERSION, role, 0, 1, secret, 1, info))

        self.engine, self.tokenizer = dial("engine", engine_info()), dial("tokenizer")
        self.spent = 0.0
        self.got_ids = self.got_messages = 0
        self.submits: list[Submit] = []
        while not (self.engine.ready and self.tokenizer.ready):
            self.turn()

    def read(self) -> None:
        for message, _ in self.engine.drain(0.0):
            if isinstance(message, Submit):
                self.submits.append(message)
        for message, frames in self.tokenizer.drain(0.0):
            if isinstance(message, StepOutput):
                self.got_messages += 1
                self.got_ids += len(frames[0]) // 4

    def turn(self) -> None:
        self.router.listener.socket.poll(5)
        started = time.thread_time()
        self.router.step(time.monotonic())
        self.spent += time.thread_time() - started
        self.read()

    def until_ids(self, count: int) -> None:
        while self.got_ids < count:
            self.turn()

    def close(self) -> None:
        self.engine.close()
        self.tokenizer.close()
        self.router.close()
        self.context.destroy(0)


def request(feed: Feed, ids: RequestIds, tokens: int) -> int:
    sid = ids.new()
    submit = Submit(sid, 0, 1, "", params(), first_hash=b"0" * 16)
    assert feed.tokenizer.send(submit, bytes(4 * tokens), secrets.token_bytes(32 * (tokens // 128)))
    return sid


def streams(feed: Feed, count: int) -> list[int]:
    """Running sequences with one id each."""
    ids = RequestIds()
    sids = [request(feed, ids, 100) for _ in range(count)]
    while len(feed.submits) < count:
        feed.turn()
    feed.submits.clear()
    send(feed, Accepted(sids, [0] * count))
    return sids


def send(feed: Feed, message: Message, *frames: bytes) -> None:
    while not feed.engine.send(message, *frames):
        feed.turn()


def step(sids: list[int], offset: int, each: int) -> tuple[StepOutput, bytes]:
    message = StepOutput(sids, [0] * len(sids), [offset] * len(sids), [each] * len(sids))
    return message, array("i", range(len(sids) * each)).tobytes()


def one_step_at_a_time(feed: Feed, sids: list[int], steps: int) -> float:
    """Microseconds of router time per id."""
    feed.got_ids, feed.spent = 0, 0.0
    for number in range(steps):
        send(feed, *step(sids, number, 1))
        feed.until_ids((number + 1) * len(sids))
    return 1e6 * feed.spent / (steps * len(sids))


def backlog(feed: Feed, sids: list[int], offset: int, waiting: int, each: int) -> tuple[float, int]:
    """Ids a second while many steps wait in the router's queue; number of messages that they became."""
    feed.got_ids = feed.got_messages = 0
    for number in range(waiting):
        message, frame = step(sids, offset + number * each, each)
        assert feed.engine.send(message, frame)
    time.sleep(0.2)  # all of it lies in the router's queue
    feed.spent = 0.0
    total = waiting * each * len(sids)
    feed.until_ids(total)
    return total / feed.spent, feed.got_messages


def requests(feed: Feed, count: int, tokens: int) -> float:
    """Microseconds of router time per request, from Submit to release."""
    ids = RequestIds()
    feed.spent = 0.0
    for _ in range(count // 50):
        sids = [request(feed, ids, tokens) for _ in range(50)]
        while len(feed.submits) < 50:
            feed.turn()
        feed.submits.clear()
        send(feed, Accepted(sids, [0] * 50))
        ended = [Finished(sid, 0, "stop", 1, Usage(tokens), stop_id=2) for sid in sids]
        message, frame = step(sids, 0, 1)
        message.finished = ended
        send(feed, message, frame)
        while feed.router.live.journal.sequences:
            feed.turn()
    return 1e6 * feed.spent / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dib") as folder:
        feed = Feed(folder)
        sids = streams(feed, args.streams)
        print(f"{'what':<52} {'value':>12}")
        print(f"{'one id per stream and step, µs per id':<52} {one_step_at_a_time(feed, sids, args.steps):>12.2f}")
        offset = args.steps
        for each in (1, 4):
            rate, messages = backlog(feed, sids, offset, 900, each)
            offset += 900 * each
            what = f"backlog of 900 steps with {each} ids each, ids/s ({messages} messages)"
            print(f"{what:<52} {rate:>12,.0f}")
        feed.close()
    with tempfile.TemporaryDirectory(prefix="dib") as folder:
        feed = Feed(folder)
        for tokens in (100, 1024, 32_768):
            print(f"{f'a request with {tokens} prompt tokens, µs':<52} {requests(feed, 2000, tokens):>12.1f}")
        feed.close()


if __name__ == "__main__":
    main()
