"""Law: HTTP that is malformed, too large or too slow is refused, and nothing hidden behind it is ever run (94)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.pipeline.laws import check_error_object
from tests.pipeline.web import drain_socket, poll
from tests.unit.frontend_world import Call, World, world
from wire.limits import Limits
from wire.messages import Generate

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GOOD = json.dumps({"model": "m", "messages": [{"role": "user", "content": "canary"}]}).encode()
HIDDEN = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD
LENGTH = b"Content-Length: 2\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

MALFORMED = {
    "both lengths": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, other order": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a list of lengths": HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a chunk not ended by CRLF": CHUNKED + b"2\r\n{}XX0\r\n\r\n",
    "a chunk ended by LF": CHUNKED + b"2\r\n{}\n0\r\n\r\n",
    "a chunk size ended by LF": CHUNKED + b"2\n{}\r\n0\r\n\r\n",
    "a hexadecimal prefix": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a huge chunk size": CHUNKED + b"fffffffffffffffff2\r\n{}\r\n0\r\n\r\n",
    "xchunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "gzip, chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "two codings": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a space before the colon": HEAD + b"Content-Length : 2\r\n\r\n{}",
    "a bare LF in a header": HEAD + b"X: a\n" + LENGTH + b"\r\n{}",
    "a bare LF after the request line": HEAD.replace(b"1.1\r\n", b"1.1\n") + LENGTH + b"\r\n{}",
    "a bare CR": HEAD + b"X: a\r" + LENGTH + b"\r\n{}",
    "an obsolete fold": HEAD + b"X: a\r\n b\r\n" + LENGTH + b"\r\n{}",
    "an obsolete fold with a tab": HEAD + b"X: a\r\n\tb\r\n" + LENGTH + b"\r\n{}",
    "a zero byte": HEAD + b"X: a\x00b\r\n" + LENGTH + b"\r\n{}",
    "no header name": HEAD + b": a\r\n" + LENGTH + b"\r\n{}",
    "another version": HEAD.replace(b"HTTP/1.1", b"HTTP/2.0") + LENGTH + b"\r\n{}",
    "a coding in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
    "an upgrade": HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + LENGTH + b"\r\n{}",
    "the HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40,
}  # fmt: skip


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


def answers(raw: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """All answers in what a server sent."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        headers = {line.split(b": ", 1)[0].decode(): line.split(b": ", 1)[1].decode() for line in lines}
        size = int(headers.get("content-length", "0"))
        found.append((int(status.split()[1]), headers, raw[:size]))
        raw = raw[size:]
    return found


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("pieces", [1, 2, 10_000])
def test_a_malformed_request_is_refused_and_what_is_behind_it_never_runs(here: World, name: str, pieces: int) -> None:
    raw = MALFORMED[name] + HIDDEN
    with socket.create_connection((here.host, here.port), 5) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        step = -(-len(raw) // pieces)
        try:
            for start in range(0, len(raw), step):
                client.sendall(raw[start : start + step])
        except OSError:
            pass  # closed already: the answer is there
        found = answers(drain_socket(client, 5))
    assert [status for status, _, _ in found] == [400], found
    status, headers, body = found[0]
    check_error_object(status, headers, body)
    assert headers["connection"] == "close"
    assert here.get("/live").status == 200
    assert here.nothing_ran()


def test_a_good_answer_under_way_is_not_cut_by_a_malformed_request_behind_it(here: World) -> None:
    with socket.create_connection((here.host, here.port), 5) as client:
        client.sendall(HIDDEN)
        call = Call(here)
        client.sendall(MALFORMED["two lengths"] + HIDDEN)
        client.sendall(HIDDEN)
        call.accept().text("fine").finish()
        found = answers(drain_socket(client, 5))
    assert [status for status, _, _ in found] == [200]
    assert json.loads(found[0][2])["choices"][0]["message"]["content"] == "fine"
    assert here.nothing_ran()


def test_a_pipelined_request_runs_after_the_first(here: World) -> None:
    raw = here.raw(
        b"GET /live HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    assert [status for status, _, _ in answers(raw)] == [200, 200]


def test_a_chunked_body_with_a_trailer_is_read_and_the_trailer_is_no_header(here: World) -> None:
    body = b"%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\nX-Session-ID: evil\r\n\r\n"
    with socket.create_connection((here.host, here.port), 5) as client:
        client.sendall(CHUNKED + body)
        assert here.tokenizer.next(Generate).session_key == ""


def test_heads_beyond_64_kib_or_100_fields_are_431(here: World) -> None:
    start = b"GET /live HTTP/1.1\r\nHost: x\r\n"
    fields = b"".join(b"X-%d: y\r\n" % i for i in range(120))
    for head in (start + fields, start + b"X: " + b"y" * 70_000 + b"\r\n", b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\n"):
        found = answers(here.raw(head + b"\r\n"))
        assert [status for status, _, _ in found] == [431]
        assert found[0][1]["x-request-id"]
    endless = start + b"X: " + b"y" * 200_000  # never ends
    assert [status for status, _, _ in answers(here.raw(endless))] == [431]
    most = b"".join(b"X-%d: y\r\n" % i for i in range(98))
    assert [status for status, _, _ in answers(here.raw(start + most + b"Connection: close\r\n\r\n"))] == [200]


def test_a_body_that_is_announced_too_large_is_413_before_it_comes(here: World) -> None:
    head = HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % ((32 << 20) + 1)
    status, headers, body = answers(here.raw(head, half_close=True))[0]
    assert check_error_object(status, headers, body)["code"] == "request_too_large"


def test_a_body_that_stops_after_it_was_refused_does_not_hold_its_connection(here: World) -> None:
    started = time.perf_counter()
    found = answers(here.raw(HEAD + b"Content-Length: %d\r\n\r\n{" % (33 << 20)))
    assert [status for status, _, _ in found] == [413]
    assert time.perf_counter() - started < 3


def test_a_chunked_body_is_counted_as_it_comes_and_the_answer_survives_the_rest() -> None:
    with world(limits=Limits(max_body_bytes=100_000)) as here:
        part = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        with socket.create_connection((here.host, here.port), 5) as client:
            client.sendall(CHUNKED + part * 200 + b"0\r\n\r\n")  # 13 MB: all of it can be sent without a reset
            status, headers, body = answers(drain_socket(client, 5))[0]
        assert check_error_object(status, headers, body)["code"] == "request_too_large"
        big = b" " * 100_000 + GOOD
        answer = here.post("/v1/chat/completions", big)
        assert answer.error["code"] == "request_too_large"


def test_slow_heads_and_slow_bodies_are_408_and_silent_connections_are_closed() -> None:
    with world(header_timeout_seconds=0.3, body_timeout_seconds=0.3) as here:
        started = time.perf_counter()
        status, headers, body = answers(here.raw(HEAD))[0]
        assert check_error_object(status, headers, body)["code"] == "request_timeout"
        status, headers, body = answers(here.raw(HEAD + b"Content-Length: 50\r\n\r\n{"))[0]
        assert check_error_object(status, headers, body)["code"] == "request_timeout"
        assert here.raw(b"") == b""
        assert here.raw(b"\r\n\r\n") == b""
        second = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\nGET /live HTT"  # kept alive, then half a head
        assert [status for status, _, _ in answers(here.raw(second))] == [200, 408]
        assert time.perf_counter() - started < 4


def test_a_connection_is_kept_for_the_next_request(here: World) -> None:
    connection = here.connect()
    try:
        for path, status in [("/live", 200), ("/nothing", 404), ("/v1/models", 200)]:
            assert here.request("GET", path, connection=connection).status == status
        answer = here.request("POST", "/v1/chat/completions", b"{}", connection=connection)
        assert answer.status == 400
        local = connection.sock.getsockname()
        assert here.request("GET", "/live", connection=connection).status == 200
        assert connection.sock.getsockname() == local
    finally:
        connection.close()


def test_no_server_header_and_an_id_on_every_answer(here: World) -> None:
    for path in ("/live", "/health", "/v1/models", "/nothing"):
        headers = here.get(path).headers
        assert "server" not in headers
        assert headers["x-request-id"].startswith("req-")
        assert here.get(path, {"X-Request-Id": "My.id-1_"}).headers["x-request-id"] == "My.id-1_"
        for bad in ("a b", "x" * 129, "a;b", "\xe9"):
            assert here.get(path, {"X-Request-Id": bad}).headers["x-request-id"].startswith("req-")


def test_a_client_that_leaves_with_requests_queued_behind_its_first_is_noticed(here: World) -> None:
    client = socket.create_connection((here.host, here.port), 5)
    client.sendall(HIDDEN + HIDDEN)
    here.tokenizer.next(Generate)
    client.close()
    poll("the request ends", lambda: not here.frontend.hub.live, 5)
    assert here.nothing_ran()
