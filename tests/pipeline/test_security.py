"""Nobody gets in by another way than the documented one.

84: pickles are never loaded, on any internal socket. 85: only the HTTP port listens, internal sockets are private.
93: every route but /live and /health wants the key. 94: requests that two servers would read differently are refused.
"""

from __future__ import annotations

import ast
import os
import pickle
import re
import socket
import stat
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from tests.pipeline.harness import ROOT, SLACK, Service, service
from tests.pipeline.parts import FakePeer, params, router
from tests.pipeline.web import poll
from wire.link import HEADER
from wire.messages import Hello, Stats, StepOutput, Submit, encoder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOURCES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if not {".venv", "tests", "build", ".git"} & set(path.relative_to(ROOT).parts)
]


# --- 84 ---------------------------------------------------------------------------------------------------------------


class Trap:
    """Its unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return (os.system, (f"touch {self.path}",))  # type: ignore[return-value]


def bad_messages(server: Service) -> float:
    return server.metrics().total("ipc_bad_messages_total")


def internal_sockets(server: Service) -> list[Path]:
    return sorted(server.run_dir().glob("*.sock"))


def test_84_pickles_at_the_sockets_are_refused_and_counted(server: Service, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    trap = pickle.dumps(Trap(canary))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def counted(wanted: float) -> bool:
        return bad_messages(server) >= wanted

    for path in internal_sockets(server):
        before = bad_messages(server)
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 2000)
        dealer.connect(f"ipc://{path}")
        hello = encoder.encode(Hello(1, "engine", 0, 1, trap, 1))
        wrong = [
            [trap],
            [HEADER.pack(0, 1) + trap],
            [HEADER.pack(0, 1) + hello],
            [HEADER.pack(0, 1) + hello, trap],
            [b""],
        ]
        for frames in wrong:
            dealer.send_multipart(frames)
        poll(f"{path.name} counts them", partial(counted, before + 5), 2 * SLACK)
        dealer.close()
    context.term()
    assert not canary.exists()
    assert server.post(CHAT, server.chat_body(max_tokens=1)).status == 200


def test_84_pickles_in_each_bytes_field_are_only_bytes(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    trap = pickle.dumps(Trap(canary))
    trap += b" " * (-len(trap) % 128)
    with router(tmp_path, 1) as tested:
        message = Submit(
            1 << 8, 0, 1, "", params(4), session_key="", first_hash=trap[:16], render_context=trap, timeout=0.0
        )
        tested.tokenizer.send(message, trap, trap)
        tested.tokenizer.send(message, trap)
        tested.tokenizer.send(message)
        tested.engines[0].send(StepOutput([1 << 8], [0], [0], [len(trap) // 4]), trap)
        tested.engines[0].send(StepOutput([1 << 8], [0], [0], [10**9]), trap)
        tested.engines[0].send(Stats({}, {}, {}, {"x": trap.decode("latin-1")}))
        assert "deepinfer:ipc_bad_messages_total" in tested.metrics()
    assert not canary.exists()


BANNED = re.compile(
    r"\b(pickle|cPickle|marshal|dill|cloudpickle|shelve)\b|_pyobj\b|allow_pickle\s*=\s*True|shell\s*=\s*True"
)


def test_84_no_source_can_load_code_from_data() -> None:
    assert len(SOURCES) > 20
    for path in SOURCES:
        text = path.read_text()
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not [name for name in names if BANNED.search(name)], (path, names)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile"), (path, node.lineno)
                assert not called.endswith("_pyobj"), (path, node.lineno)
                words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert words.get("allow_pickle") != "True", (path, node.lineno)
                assert words.get("shell") != "True", (path, node.lineno)
                if called == "torch.load":
                    assert words.get("weights_only") == "True", (path, node.lineno)


def test_65_the_built_in_hash_makes_no_key() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) != "hash", (path, node.lineno)


# --- 85 ---------------------------------------------------------------------------------------------------------------


def test_85_only_the_http_port_listens_on_loopback(server: Service) -> None:
    listening = set()
    for process in [psutil.Process(server.process.pid), *server.children()]:
        for found in process.net_connections(kind="inet"):
            assert found.status in (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT, "NONE"), found
            if found.status not in (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT):
                listening.add((found.laddr.ip, found.laddr.port))
    assert listening == {("127.0.0.1", server.port)}


def test_85_the_sockets_lie_in_a_private_folder(server: Service, folder: Path) -> None:
    run_dir = server.run_dir()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert run_dir.stat().st_uid == os.getuid()
    with service(folder) as other:
        assert other.run_dir() != run_dir
    assert internal_sockets(server)
    for path in server.folder.rglob("*"):
        assert not stat.S_ISSOCK(path.stat().st_mode)


def test_85_another_user_cannot_connect(server: Service) -> None:
    if os.getuid() != 0:  # only root can become another user; the folder's mode is checked above for all
        return
    program = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    for path in internal_sockets(server):
        done = subprocess.run(
            ["python3", "-c", program, str(path)], user=65534, group=65534, cwd="/", capture_output=True, check=False
        )
        assert done.returncode != 0
        assert b"PermissionError" in done.stderr, done.stderr


def test_85_a_message_without_the_session_secret_is_refused_and_counted(server: Service) -> None:
    def counted(stranger: FakePeer, wanted: float) -> bool:
        stranger.pump()
        return bad_messages(server) >= wanted

    for path in internal_sockets(server):
        before = bad_messages(server)
        stranger = FakePeer(path, b"\x00" * 32, "tokenizer" if path.name == "router.sock" else "frontend", 7)
        poll("it is counted", partial(counted, stranger, before + 1), 2 * SLACK)
        assert not stranger.dialer.ready
        assert not stranger.inbox
        stranger.close()


def test_85_hooks_want_a_loopback_host(folder: Path) -> None:
    found = Service(folder, "--host", "0.0.0.0")
    try:
        assert found.process.wait(30) != 0
    finally:
        found.stop()
    assert "test-hooks" in found.log()


def test_hooks_are_off_by_default(folder: Path) -> None:
    with service(folder, hooks=False) as server:
        answer = server.post("/deepinfer/test/hook", {"name": "flush_device_cache", "rank": 0, "args": {}})
        assert answer.status == 404
        hooks = {"script": [5], "dump_prompt": True, "fail_step": 1}
        answer = server.post(CHAT, server.chat_body(hooks=hooks, max_tokens=9))
        assert answer.usage["completion_tokens"] == 9
        assert "deepinfer_prompt_ids" not in answer.json()


# --- 93 ---------------------------------------------------------------------------------------------------------------

KEY = "sk-correct-horse-battery"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with one key, given in a file."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text(f"team:{KEY}\n")
    (folder / "keys").chmod(0o600)
    with service(folder, "--api-key-file", str(folder / "keys"), key=KEY) as found:
        yield found


ODD_PATHS = [
    "//v1/models",
    "/V1/models",
    "/v1/../metrics",
    "/v1/./models",
    "/v1%2fmodels",
    "/v1/models/",
    "/metrics/",
    "/live/../metrics",
    "/health/../v1/models",
    "/health%2f..%2fmetrics",
    "/live//",
    "/live;a=b",
    "/%6detrics",
    "/v1/models?key=x",
    "/v1/models#x",
    "/docs",
    "/openapi.json",
]


def registered_routes() -> list[tuple[str, str]]:
    """Methods and paths of every route, by what the frontend registers (parameters filled in)."""
    found = set()
    for path in (ROOT / "frontend").rglob("*.py"):
        for quoted in re.findall(r'"(/[A-Za-z0-9_/{}.:-]+)"', path.read_text()):
            found.add(re.sub(r"{[^}]*}", "x", quoted))
    known = {CHAT, COMPLETIONS, "/v1/models", "/metrics", "/deepinfer/metrics", "/deepinfer/test/hook"}
    return [(method, path) for path in sorted(found | known) for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS")]


def test_93_every_route_wants_the_key(locked: Service) -> None:
    wrong: list[dict[str, str]] = [
        {"Authorization": ""},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"Authorization": "Bearer é"},
        {"X-Api-Key": "wrong", "Authorization": ""},
    ]
    routes = registered_routes() + [("GET", path) for path in ODD_PATHS]
    connection = locked.connect()
    for method, path in routes:
        if method == "GET" and path in ("/live", "/health"):
            continue
        for headers in wrong if path in (CHAT, "/metrics") else wrong[:3]:
            answer = locked.request(
                method, path, b"{}" if method in ("POST", "PUT") else None, headers, None, connection
            )
            assert answer.status in (401, 404), (method, path, headers, answer.status)
            assert answer.error
            if path in (CHAT, "/metrics", "/v1/models"):
                assert answer.status == 401
    connection.close()


def test_93_with_the_key_all_is_served(locked: Service) -> None:
    assert locked.post(CHAT, locked.chat_body(max_tokens=1)).status == 200
    assert locked.get("/metrics").status == locked.get("/v1/models").status == 200
    for path in ("/live", "/health"):
        assert locked.get(path, {"Authorization": ""}).status == 200
    answer = locked.post(CHAT, locked.chat_body(max_tokens=1), {"Authorization": f"bearer {KEY}"})
    assert answer.status in (200, 401)
    assert KEY not in locked.log()


def test_93_a_refused_body_is_not_read(locked: Service) -> None:
    got = locked.raw(HEAD + b"Content-Length: 30000000\r\n\r\n{", timeout=SLACK)
    assert got.startswith(b"HTTP/1.1 401 "), got[:80]


# --- 94 ---------------------------------------------------------------------------------------------------------------

HIDDEN = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 58\r\n\r\n"
    b'{"model": "hidden-canary", "messages": [{"role": "user"}]}'
)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
SMUGGLED = {
    "length and chunked": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 60\r\n\r\n{}",
    "two lengths in one": HEAD + b"Content-Length: 2, 60\r\n\r\n{}",
    "signed length": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "chunk without CRLF": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
    "chunk size with sign": HEAD + b"Transfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n",
    "xchunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "space before the colon": HEAD + b"Content-Length : 2\r\n\r\n{}",
    "space before the chunked colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "bare LF": HEAD + b"X-A: b\nContent-Length: 2\r\n\r\n{}",
    "bare CR": HEAD + b"X-A: b\rContent-Length: 2\r\n\r\n{}",
    "line fold": HEAD + b"X-A: b\r\n Content-Length: 60\r\nContent-Length: 2\r\n\r\n{}",
    "no name": HEAD + b": x\r\nContent-Length: 2\r\n\r\n{}",
    "NUL": HEAD + b"X-A: \x00\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_94_requests_that_can_be_read_two_ways_are_refused(server: Service, name: str) -> None:
    got = server.raw(SMUGGLED[name] + HIDDEN, timeout=3)
    assert got.startswith(b"HTTP/1.1 400 "), got[:200]
    assert got.count(b"HTTP/1.1 ") == 1, "the hidden request was answered"
    assert b"hidden-canary" not in got
    assert "hidden-canary" not in server.log()


def test_94_two_honest_requests_in_a_row_are_both_served(server: Service) -> None:
    """What the cases above differ from: pipelined requests, chunked and with a length."""
    chunked = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    got = server.raw(HEAD + chunked + HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}", timeout=5)
    assert got.count(b"HTTP/1.1 400 ") == 2


@pytest.mark.parametrize("lines", [101, 5000])
def test_headers_have_limits(server: Service, lines: int) -> None:
    head = b"GET /live HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: a\r\n" % line for line in range(lines)) + b"\r\n"
    assert server.raw(head, timeout=3).startswith(b"HTTP/1.1 431 ")
    large = b"GET /live HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * (65 << 10) + b"\r\n\r\n"
    assert server.raw(large, timeout=3).startswith(b"HTTP/1.1 431 ")


def test_slow_headers_are_cut(folder: Path) -> None:
    with (
        service(folder, "--header-timeout-seconds", "1") as server,
        socket.create_connection((server.host, server.port), 1 * SLACK + 2) as slow,
    ):
        slow.sendall(b"GET /live HTTP/1.1\r\nHost:")
        got = slow.recv(1000)
        assert got == b"" or got.startswith(b"HTTP/1.1 4"), got
