"""Nobody gets anything of another's request, and nothing private is written down.

95: with an echo model, 64 streams at a time and aborts, each answer is its own prompt's. 96: markers placed in every
private place of requests are in no log.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.pipeline.harness import TINY, Service, service
from tests.pipeline.web import together

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two ranks with small pools, two tokenizers, two frontends."""
    flags = ("--dp", "2", "--tokenizers", "2", "--frontends", "2", "--device-blocks", "80", "--max-running", "16")
    with service(tmp_path_factory.mktemp("crowded"), *flags) as found:
        yield found


@pytest.mark.parametrize("requests", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_95_no_answer_holds_a_marker_of_another(crowded: Service, requests: int) -> None:
    source = random.Random(95)
    shared = "A preamble that many prompts share, so that their first blocks are the same ones. " * 3
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    numbers = iter(range(requests))
    lock = threading.Lock()
    finished = []

    def one(number: int, abort: bool, lines: int) -> None:
        marker = f"marker{number:06d}e"
        text = (shared if number % 2 else "") + f"begin {marker} " * (1 + number % 9) + "end"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        body = crowded.prompt_body(ids, hooks={"echo": True}, temperature=0)
        stream = crowded.stream(COMPLETIONS, body, timeout=60)
        assert stream.status == 200, stream.answer
        if abort:
            for _ in range(lines):
                stream.next_line()
            stream.close()
            assert text.startswith(stream.text())
        else:
            stream.read()
            assert stream.text() == text
            assert set(re.findall(r"marker\d{6}e", stream.text())) == {marker}
            finished.append(number)

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
                if number is None:
                    return
                abort, lines = source.random() < 0.3, source.randrange(40)
            one(number, abort, lines)

    together([work] * 64)
    assert len(finished) > requests * 0.6
    for number in finished[:: max(1, len(finished) // 20)]:  # solo runs, now that all is quiet
        one(number, False, 0)
    crowded.idle()


PLACES = [
    "prompt",
    "tool_arguments",
    "user",
    "metadata",
    "key",
    "header",
    "query",
    "model",
    "stop",
    "tool",
    "completion",
]


def test_96_private_text_is_in_no_log(folder: Path) -> None:
    markers = {place: f"canary{place}77" for place in PLACES}
    (folder.parent / "keys").write_text(f"team:{markers['key']}\n")
    (folder.parent / "keys").chmod(0o600)
    with service(folder, "--api-key-file", str(folder.parent / "keys"), key=markers["key"]) as server:
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "f", "arguments": f'{{"a": "{markers["tool_arguments"]}"}}'},
        }
        body = {
            "model": server.model,
            "messages": [
                {"role": "user", "content": markers["prompt"]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": markers["prompt"]},
            ],
            "tools": [{"type": "function", "function": {"name": markers["tool"], "description": markers["tool"]}}],
            "user": markers["user"],
            "stop": [markers["stop"]],
            "metadata": {"note": markers["metadata"]},
            "max_tokens": 5,
        }
        headers = {"X-Private": markers["header"], "X-Session-ID": markers["header"], "User-Agent": markers["header"]}
        path = f"{CHAT}?q={markers['query']}"
        good = [body, body | {"stream": True}, body | {"n": 2}]
        wrong = [
            body | {"model": markers["model"]},
            body | {"temperature": 9},
            body | {"messages": [{"role": markers["prompt"], "content": "a"}]},
            body | {"messages": [{"role": "user", "content": markers["prompt"] + " word" * 100_000}]},
            body | {markers["prompt"]: 1, "n": 0},
            body | {"metadata": {"deepinfer_hooks": {"nan_step": 2}, "note": markers["metadata"]}},
            body | {"metadata": {"deepinfer_hooks": {"fail_admit": True}}},
            body | {"metadata": {"deepinfer_hooks": {"fail_step": 2}}},
        ]
        for request in good:
            assert server.post(path, request, headers).status == 200
        assert server.post(COMPLETIONS, server.prompt_body(markers["completion"], max_tokens=2), headers).status == 200
        for request in wrong:
            answer = server.post(path, request, headers)
            assert answer.status >= 400
            assert not [marker for marker in markers.values() if marker.encode() in answer.body], answer.body
        for payload in (b'{"model": ' + markers["prompt"].encode(), markers["prompt"].encode() * 3):
            assert server.post(path, payload, headers).status == 400
        assert server.post(path, body, headers | {"Authorization": f"Bearer {markers['key']}x"}).status == 401
        assert server.get(f"/v1/models/{markers['model']}").status == 404
        assert server.get(f"/{markers['query']}").status == 404
        stream = server.stream(CHAT, body | {"max_tokens": 500, "stream": True})
        stream.next_line()
        stream.close()
        server.raw(f"GET /{markers['query']} HTTP/1.1\r\nBad header {markers['header']}\r\n\r\n".encode())
        server.idle()
        log = server.log()
    found = {place for place, marker in markers.items() if marker in log or marker in server.log()}
    assert not found, [line for line in log.splitlines() if "canary" in line]
    metrics_and_log = log + server.log()
    assert "Traceback" not in metrics_and_log


@pytest.mark.parametrize("request_id", ["a%0Ab", "a\tb", "\x1b[2J", "x" * 5000])
def test_96_log_lines_are_single_lines(server: Service, request_id: str) -> None:
    before = len(server.log())
    answer = server.post(CHAT, server.chat_body(hooks={"nan_step": 1}, max_tokens=3), {"X-Request-Id": request_id})
    assert answer.status in (400, 500)  # some of these are no header values at all
    new = server.log()[before:]
    assert request_id not in new
    for line in new.splitlines():
        assert re.match(r"\d\d:\d\d:\d\d [A-Z] \S+ \S+: ", line), line
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", line), line


def test_95_many_tasks_share_one_connection_pool(crowded: Service) -> None:
    """Keep-alive connections carry requests of different clients in turn: each gets its own answer."""

    def turns(lane: int) -> None:
        connection = crowded.connect()
        for turn in range(6):
            text = f"lane {lane} turn {turn}"
            body = crowded.prompt_body(text, hooks={"echo": True})
            assert crowded.request("POST", COMPLETIONS, body, connection=connection).text() == text
        connection.close()

    together([partial(turns, lane) for lane in range(24)])
