"""A plain HTTP/1.1 client for tests: whole answers, raw bytes, and streams recorded line by line with times."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.pipeline.laws import check_error_object, check_stream

T = TypeVar("T")
Body = dict[str, Any] | list[Any] | bytes | None


@dataclass
class Answer:
    """A whole HTTP answer. `headers` has lower-case names; `seconds` is the time from send to the last byte."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked against the contract."""
        return check_error_object(self.status, self.headers, self.body)

    def text(self, choice: int = 0) -> str:
        """The text of one choice, of either route."""
        found = self.json()["choices"][choice]
        return str(found["message"]["content"] if "message" in found else found["text"])

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.json()["usage"]
        return usage


@dataclass
class Stream:
    """A streamed answer under way. `lines` holds raw lines without the line end, `times` when each one was read.

    When the status is not 200 (or the type is not SSE), `answer` holds the whole answer and there are no lines.
    """

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    started: float
    choices: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    lines: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    answer: Answer | None = None
    ended: bool = False

    def next_line(self) -> bytes | None:
        """The next line, or None at the end of the body. Raises http.client.IncompleteRead on a cut body."""
        if self.ended:
            return None
        line = self.response.readline()
        if not line:
            self.ended = True
            self.connection.close()
            return None
        assert line.endswith(b"\n"), f"the body ends inside a line: {line[:80]!r}"
        self.lines.append(line[:-1])
        self.times.append(time.perf_counter())
        return line[:-1]

    def events(self) -> Iterator[dict[str, Any]]:
        """Chunks as they come; ends at the end of the body."""
        while (line := self.next_line()) is not None:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])

    def first_token(self) -> float:
        """Read up to the first chunk that carries text; gives seconds since the request was sent."""
        for event in self.events():
            assert "error" not in event, event
            for choice in event["choices"]:
                if (choice.get("delta") or {}).get("content") or choice.get("text"):
                    return time.perf_counter() - self.started
        raise AssertionError(f"no token came: {self.lines[-4:]}")

    def read(self) -> Stream:
        """Read to the end and check the stream against the laws that hold for all of them."""
        while self.next_line() is not None:
            pass
        assert self.answer is None, f"refused with {self.answer.status}: {self.answer.body[:300]!r}"
        check_stream(self.headers, self.lines, self.choices)
        return self

    def close(self) -> None:
        """Leave, as a client that gives up does. A hard close: bytes that wait unread make it a reset."""
        self.ended = True
        self.response.close()
        self.connection.close()

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith(b"data: {")]

    @property
    def error(self) -> dict[str, Any] | None:
        """The in-band error object, if there is one."""
        found = [chunk["error"] for chunk in self.chunks if "error" in chunk]
        return found[0] if found else None

    def deltas(self, choice: int = 0) -> list[str]:
        """Text deltas of one choice that are not empty."""
        found = []
        for chunk in self.chunks:
            for part in chunk.get("choices", []):
                text = part["delta"].get("content") if "delta" in part else part["text"]
                if part["index"] == choice and text:
                    found.append(text)
        return found

    def text(self, choice: int = 0) -> str:
        return "".join(self.deltas(choice))

    def finish_reason(self, choice: int = 0) -> str | None:
        found = [
            part["finish_reason"]
            for chunk in self.chunks
            for part in chunk.get("choices", [])
            if part["index"] == choice and part["finish_reason"] is not None
        ]
        return found[0] if found else None

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of the last chunk that has one."""
        usage: dict[str, Any] = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")][-1]
        return usage


class Client:
    """Requests to one server. Connections are not shared; each call has a time limit."""

    def __init__(self, host: str, port: int, key: str | None = None, timeout: float = 30.0) -> None:
        self.host, self.port, self.key, self.timeout = host, port, key, timeout

    def connect(self, timeout: float | None = None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout or self.timeout)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Body, headers: dict[str, str] | None
    ) -> None:
        sent = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        payload = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        if payload is not None:
            sent["Content-Type"] = "application/json"
        connection.request(method, path, payload, {**sent, **(headers or {})})

    def request(
        self,
        method: str,
        path: str,
        body: Body = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Answer:
        """One request, its whole answer. A `connection` given is kept open."""
        used = connection or self.connect(timeout)
        started = time.perf_counter()
        try:
            self._send(used, method, path, body, headers)
            response = used.getresponse()
            content = response.read()
        finally:
            if connection is None:
                used.close()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, content, time.perf_counter() - started)

    def get(self, path: str, headers: dict[str, str] | None = None, timeout: float | None = None) -> Answer:
        return self.request("GET", path, None, headers, timeout)

    def post(
        self, path: str, body: Body, headers: dict[str, str] | None = None, timeout: float | None = None
    ) -> Answer:
        return self.request("POST", path, body, headers, timeout)

    def stream(
        self,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
        receive_buffer: int = 0,
    ) -> Stream:
        """Send a request with stream=true and give back the stream at its status line.

        `receive_buffer` > 0 sets the socket's receive buffer in bytes, for a client that does not read.
        """
        connection = self.connect(timeout)
        if receive_buffer:
            connection.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.sock.settimeout(timeout or self.timeout)
            connection.sock.connect((self.host, self.port))
        started = time.perf_counter()
        prompt = body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        self._send(connection, "POST", path, {"stream": True, **body}, headers)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        stream = Stream(connection, response, started, prompts * (body.get("n") or 1), response.status, found)
        if response.status != 200 or not found.get("content-type", "").startswith("text/event-stream"):
            stream.answer = Answer(response.status, found, response.read(), time.perf_counter() - started)
            stream.ended = True
            connection.close()
        return stream

    def raw(self, data: bytes, timeout: float = 5.0, half_close: bool = False) -> bytes:
        """Send bytes as they are and give back everything until the server closes (or the time is over)."""
        with socket.create_connection((self.host, self.port), timeout) as connection:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            return drain_socket(connection, timeout)


def drain_socket(connection: socket.socket, timeout: float) -> bytes:
    """All bytes until the peer closes; raises TimeoutError when it does not within `timeout` seconds."""
    deadline, found = time.perf_counter() + timeout, b""
    while True:
        connection.settimeout(max(0.01, deadline - time.perf_counter()))
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return found
        if not part:
            return found
        found += part


def together(calls: list[Callable[[], T]]) -> list[T]:
    """Run all calls at the same time, each in a thread, and give their results in order."""
    if not calls:
        return []
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def poll(what: str, probe: Callable[[], T | None], seconds: float, pause: float = 0.03) -> T:
    """Ask `probe` until it gives something true, at most for `seconds`; then fail with `what`."""
    deadline = time.perf_counter() + seconds
    while True:
        if found := probe():
            return found
        if time.perf_counter() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(pause)
