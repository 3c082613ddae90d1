"""A lean HTTP client for benches: epoll, keep-alive, counts `data:` lines; tells its own CPU time.

    python -m bench.client < job.json

The job is one JSON object (see `Job`); the result is one JSON object on stdout (see `Result`). One process, one thread:
the time that it takes from the measured machine is `cpu_seconds`.
"""

from __future__ import annotations

import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
END = b"0\r\n\r\n"
DATA = b"data:"
TAIL_BYTES = 600
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
RECEIVE_BYTES = 1 << 18


class Job(msgspec.Struct):
    """Send `requests` streamed requests, `streams` at a time. Request k has body `bodies[k % len(bodies)]`."""

    port: int
    bodies: list[str]  # JSON with "stream": true and stream_options.include_usage: true
    streams: int
    requests: int
    path: str = "/v1/completions"
    headers: dict[str, str] = {}
    pause: float = 0.0  # seconds between the end of a request and the next one on its connection
    seconds: float = 0.0  # start no further request after that time; 0 = no limit


class Result(msgspec.Struct):
    """`seconds` runs from the first byte of the last stream's first answer (or the start) to the last end."""

    requests: int
    tokens: int
    chunks: int
    seconds: float
    cpu_seconds: float
    first_byte_ms: list[float]  # from the send of a request to the first byte of its answer's body
    failed: list[str]


class Connection:
    """One keep-alive connection and the answer that is under way on it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.tail = b""
        self.started = 0.0
        self.headers_done = False

    def send(self, request: bytes) -> None:
        """Send the whole request. The kernel's buffer may be smaller than a long prompt."""
        self.tail, self.headers_done = b"", False
        self.started = time.perf_counter()
        view = memoryview(request)
        while view:
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                select.select([], [self.socket], [], 1)


class Client:
    """All connections of one job."""

    def __init__(self, job: Job) -> None:
        extra = "".join(f"{name}: {value}\r\n" for name, value in job.headers.items())
        head = f"POST {job.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{extra}"
        self._requests = [f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}".encode() for body in job.bodies]
        self._job, self._next = job, 0
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._waiting: list[tuple[float, Connection]] = []
        self.tokens = self.chunks = self.done = 0
        self.first_byte_ms: list[float] = []
        self.failed: list[str] = []

    def run(self) -> Result:
        job = self._job
        for _ in range(job.streams):
            connection = Connection(job.port)
            self._connections[connection.socket.fileno()] = connection
            self._epoll.register(connection.socket, select.EPOLLIN)
        started, cpu = time.perf_counter(), time.process_time()
        self._until = started + (job.seconds or 1e9)
        for connection in list(self._connections.values()):
            self._start(connection)
        while self._connections:
            timeout = 5.0 if not self._waiting else max(0.0, self._waiting[0][0] - time.perf_counter())
            for fd, _ in self._epoll.poll(timeout):
                self._receive(self._connections[fd])
            while self._waiting and self._waiting[0][0] <= time.perf_counter():
                self._start(self._waiting.pop(0)[1])
        seconds = time.perf_counter() - started
        return Result(
            self.done,
            self.tokens,
            self.chunks,
            seconds,
            time.process_time() - cpu,
            self.first_byte_ms,
            self.failed[:5],
        )

    def _start(self, connection: Connection) -> None:
        if self._next >= self._job.requests or time.perf_counter() > self._until:
            self._leave(connection)
            return
        request = self._requests[self._next % len(self._requests)]
        self._next += 1
        connection.send(request)

    def _leave(self, connection: Connection) -> None:
        del self._connections[connection.socket.fileno()]
        self._epoll.unregister(connection.socket)
        connection.socket.close()

    def _receive(self, connection: Connection) -> None:
        data = connection.socket.recv(RECEIVE_BYTES)
        if not data:
            self.failed.append(f"closed after {connection.tail[-200:]!r}")
            self._leave(connection)
            return
        if not connection.headers_done:
            data = self._take_headers(connection, data)
            if not data:
                return
        # The last 4 bytes before cannot hold a whole `data:`, so none is counted twice.
        self.chunks += (connection.tail[-4:] + data).count(DATA)
        connection.tail = (connection.tail + data)[-TAIL_BYTES:]
        if connection.tail.endswith(END):
            self._end(connection)

    def _take_headers(self, connection: Connection, data: bytes) -> bytes:
        """What follows the headers; b"" while there is nothing."""
        connection.tail += data
        head, blank, rest = connection.tail.partition(b"\r\n\r\n")
        if not blank or not rest:
            return b""
        self.first_byte_ms.append(1000 * (time.perf_counter() - connection.started))
        connection.headers_done, connection.tail = True, b""
        if not head.startswith(b"HTTP/1.1 200"):
            self.failed.append((head + b" " + rest)[-400:].decode(errors="replace"))
            self._leave(connection)
            return b""
        return rest

    def _end(self, connection: Connection) -> None:
        found = COMPLETION_TOKENS.search(connection.tail)
        if not found:
            self.failed.append(connection.tail[-200:].decode(errors="replace"))
            self._leave(connection)
            return
        self.tokens += int(found[1])
        self.chunks -= 2  # the usage chunk and [DONE]
        self.done += 1
        if self._job.pause:
            self._waiting.append((time.perf_counter() + self._job.pause, connection))
        else:
            self._start(connection)


class Load:
    """A client process under way, for a bench."""

    def __init__(self, job: Job) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.client"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(job))
        self._process.stdin.close()
        self._process.stdin = None

    def result(self, seconds: float = 120.0) -> Result:
        """Wait for its end. Raises RuntimeError when a request failed."""
        out, _ = self._process.communicate(timeout=seconds)
        result = msgspec.json.decode(out, type=Result)
        if result.failed:
            raise RuntimeError(f"requests failed: {result.failed}")
        return result

    def stop(self) -> None:
        """End a load whose result is not wanted."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(Client(job).run()))


if __name__ == "__main__":
    main()
