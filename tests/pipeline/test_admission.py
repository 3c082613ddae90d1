"""Overload and room: what does not fit is refused at once, and nobody behind it waits.

11: 429 and 503 say when to come again. 13: a full queue refuses streams with a status, too. 39: places are counted
by sequences. 44: more tokens than the pool holds are refused. 45: a large request is passed by a bounded number of
small ones. 46: client ids are labels. 28: (see test_tokenizing.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.harness import SLACK, Service, service
from tests.pipeline.web import Answer, Stream, poll, together

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One place to run and four in the queue."""
    with service(tmp_path_factory.mktemp("narrow"), "--max-running", "1", "--max-queued-requests", "4") as found:
        yield found


def check_queue_full(answer: Answer) -> None:
    assert answer.status == 429
    assert answer.error["type"] == "rate_limit_error"
    assert answer.error["code"] == "queue_full"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.seconds < 0.2 * SLACK


@pytest.mark.parametrize("stream", [False, True])
def test_39_five_of_ten_are_served(narrow: Service, stream: bool) -> None:
    body = narrow.chat_body(hooks={"step_ms": 20}, max_tokens=20)
    if stream:
        opened = together([lambda: narrow.stream(CHAT, body)] * 10)
        refused = [found.answer for found in opened if found.answer]
        served = [found.read() for found in opened if not found.answer]
        assert [found.finish_reason() for found in served] == ["length"] * 5
    else:
        answers = together([lambda: narrow.post(CHAT, body)] * 10)
        refused = [answer for answer in answers if answer.status != 200]
        assert len([answer for answer in answers if answer.status == 200]) == 5
    assert len(refused) == 5
    for answer in refused:
        check_queue_full(answer)
    narrow.idle()
    assert narrow.post(CHAT, narrow.chat_body(max_tokens=2)).status == 200  # no restart is needed


def test_39_three_choices_take_three_places(narrow: Service) -> None:
    running = narrow.stream(CHAT, narrow.chat_body(hooks={"step_ms": 50}, max_tokens=1000))
    running.first_token()
    slow = {"step_ms": 20}
    three = narrow.stream(CHAT, narrow.chat_body(hooks=slow, n=3, max_tokens=10))
    assert three.status == 200
    check_queue_full(narrow.post(CHAT, narrow.chat_body(n=3, max_tokens=2)))
    last = narrow.stream(CHAT, narrow.chat_body(hooks=slow, max_tokens=2))
    assert last.status == 200
    check_queue_full(narrow.post(CHAT, narrow.chat_body(max_tokens=2)))
    running.close()
    assert {three.read().finish_reason(choice) for choice in range(3)} == {"length"}
    last.read()


def test_39_more_choices_than_places_never_fit_in_part(narrow: Service) -> None:
    check_queue_full(narrow.post(CHAT, narrow.chat_body(n=8, max_tokens=2)))
    check_queue_full(narrow.post(COMPLETIONS, narrow.prompt_body(["a", "b"], n=4, max_tokens=2)))
    narrow.idle()


def test_39_tokens_are_limited_too(folder: Path) -> None:
    with service(folder, "--max-running", "1", "--max-queued-tokens", "600") as server:
        running = server.stream(COMPLETIONS, server.prompt_body([5] * 10, hooks={"step_ms": 50}, max_tokens=1000))
        running.first_token()
        waiting = server.stream(COMPLETIONS, server.prompt_body([5] * 500, max_tokens=2))
        assert waiting.status == 200
        check_queue_full(server.post(COMPLETIONS, server.prompt_body([6] * 500, max_tokens=2)))
        running.close()
        waiting.read()


def test_11_refusals_that_clients_must_not_repeat_have_no_retry_after(server: Service) -> None:
    wrong: list[dict[str, Any]] = [{"temperature": 9}, {"model": "other"}, {"messages": []}, {"max_tokens": 10**9}]
    for fields in wrong:
        answer = server.post(CHAT, server.chat_body() | fields)
        assert answer.status in (400, 404)
        assert "retry-after" not in answer.headers


# --- 44, 45: the block pool -------------------------------------------------------------------------------------------

POOL_BLOCKS, BLOCK = 8, 128


@pytest.fixture(scope="module")
def small_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A pool of 8 blocks: less than the model's context."""
    flags = ("--device-blocks", str(POOL_BLOCKS), "--max-bypass", "4")
    with service(tmp_path_factory.mktemp("small_pool"), *flags) as found:
        yield found


def pool_limit(server: Service) -> int:
    message = server.post(COMPLETIONS, server.prompt_body([5] * 1100, max_tokens=1)).error["message"]
    found = re.search(r"maximum context length is (\d+) tokens", message)
    assert found, message
    return int(found[1])


def test_44_more_than_the_pool_is_refused_at_once(small_pool: Service) -> None:
    limit = pool_limit(small_pool)
    assert (POOL_BLOCKS - 2) * BLOCK <= limit <= POOL_BLOCKS * BLOCK
    running = small_pool.stream(COMPLETIONS, small_pool.prompt_body([5] * 10, hooks={"step_ms": 20}, max_tokens=100))
    running.first_token()
    answer = small_pool.post(COMPLETIONS, small_pool.prompt_body([5] * 100, max_tokens=limit - 99))
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "prompt")
    assert answer.seconds < 0.2 * SLACK
    assert running.read().finish_reason() == "length"
    fits = small_pool.post(COMPLETIONS, small_pool.prompt_body([5] * 100, max_tokens=limit - 100))
    assert fits.usage["completion_tokens"] == limit - 100
    assert f"{limit}" in small_pool.log()  # the default is min(model, pool), said in one line


def test_44_an_explicit_context_above_the_pool_ends_the_start(folder: Path) -> None:
    found = Service(folder, "--device-blocks", str(POOL_BLOCKS), "--context-length", "1500")
    try:
        code = found.process.wait(30)
    finally:
        found.stop()
    assert code != 0
    line = next((line for line in found.log().splitlines() if "1500" in line), "")
    assert re.search(r"\b(1024|896)\b", line), found.log()[-1000:]


def test_45_a_large_request_is_passed_by_a_bounded_number_of_small_ones(small_pool: Service) -> None:
    """While one request holds blocks for 3 s, a large one waits for all of them, and small ones that fit arrive."""
    limit, bypass = pool_limit(small_pool), 4
    held = small_pool.prompt_body([5] * 300, hooks={"step_ms": 20}, max_tokens=150)
    holder = small_pool.stream(COMPLETIONS, held)
    holder.first_token()
    whole_pool = small_pool.prompt_body([6] * (limit - 20), hooks={"step_ms": 20}, max_tokens=10)
    large = small_pool.stream(COMPLETIONS, whole_pool)
    assert large.status == 200

    def first_token(stream: Stream) -> float:
        stream.first_token()
        came = time.perf_counter()
        stream.read()
        return came

    def end(stream: Stream) -> float:
        stream.read()
        return time.perf_counter()

    def small(number: int) -> float:
        return first_token(small_pool.stream(COMPLETIONS, small_pool.prompt_body([8 + number] * 20, max_tokens=2)))

    sent = time.perf_counter()
    ended, large_began, *began = together(
        [partial(end, holder), partial(first_token, large), *[partial(small, number) for number in range(12)]]
    )
    before = sorted(moment for moment in began if moment < large_began)
    assert 1 <= len(before) <= bypass, (len(before), bypass)
    assert before[0] - sent < 0.2 * SLACK, "a small request that fits waited behind a large one"
    assert before[-1] < ended < large_began


# --- 46 ---------------------------------------------------------------------------------------------------------------


def test_46_requests_with_the_same_client_ids_are_strangers(server: Service) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {"X-Request-Id": "twin", "traceparent": trace}

    def ask(number: int) -> tuple[str, Any]:
        body = server.chat_body(f"question {number % 3}", request_id="twin", max_tokens=40, hooks={"step_ms": 3})
        if number % 2:
            stream = server.stream(CHAT, body, headers).read()
            assert stream.headers["x-request-id"] == "twin"
            return stream.chunks[0]["id"], (number % 3, stream.text())
        answer = server.post(CHAT, body, headers)
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "twin"
        return answer.json()["id"], (number % 3, answer.text())

    found = together([partial(ask, number) for number in range(12)])
    assert len({response_id for response_id, _ in found}) == 12
    assert len({text for _, text in found}) == 3
    solo = {
        (number, server.post(CHAT, server.chat_body(f"question {number}", max_tokens=40)).text()) for number in range(3)
    }
    assert {text for _, text in found} == solo


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-1.2_3", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("a/b", False),
        ("\x1b[31mred", False),
        ("é", False),
    ],
)
def test_96_client_request_ids_are_limited(server: Service, given: str, kept: bool) -> None:
    for answer in (
        server.post(CHAT, server.chat_body(max_tokens=1), {"X-Request-Id": given}),
        server.post(CHAT, {}, {"X-Request-Id": given}),
        server.get("/v1/models", {"X-Request-Id": given}),
    ):
        echoed = answer.headers["x-request-id"]
        assert (echoed == given) == kept
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", echoed)


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_deadline_before_the_first_byte_is_504(narrow: Service) -> None:
    running = narrow.stream(CHAT, narrow.chat_body(hooks={"step_ms": 50}, max_tokens=1000))
    running.first_token()
    answer = narrow.post(CHAT, narrow.chat_body(max_tokens=2), {"X-Request-Timeout": "0.3"})
    assert answer.status == 504
    assert answer.error["code"] == "request_timeout"
    assert answer.seconds < 0.3 * SLACK
    running.close()


def test_a_deadline_in_a_stream_is_in_band(narrow: Service) -> None:
    stream: Stream = narrow.stream(
        CHAT, narrow.chat_body(hooks={"step_ms": 50}, max_tokens=1000), {"X-Request-Timeout": "0.5"}
    ).read()
    assert stream.error is not None
    assert stream.error["code"] == "request_timeout"
    assert stream.times[-1] - stream.started < 0.5 * SLACK
    poll("it runs no more", lambda: narrow.metrics().total("requests_running") == 0, 2 * SLACK)


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
def test_a_wrong_deadline_is_refused(server: Service, value: str) -> None:
    answer = server.post(CHAT, server.chat_body(max_tokens=1), {"X-Request-Timeout": value})
    assert answer.status == 400
    assert answer.error["param"] == "X-Request-Timeout"
