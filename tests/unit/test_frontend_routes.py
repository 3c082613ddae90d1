"""Law: each route and method answers with its page or the contract's error, behind the keys (2, 3, 11-13, 93)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from api import parse
from tests.pipeline.web import poll
from tests.unit.frontend_world import Call, World, world
from wire.limits import Limits
from wire.messages import Generate, Hook, HookReply, MetricsQuery, MetricsReply, ServiceStatus, Shape, Stats

GET = ["/v1/models", "/v1/models/m", "/health", "/live", "/metrics", "/deepinfer/metrics"]
POST = ["/v1/chat/completions", "/v1/completions"]
ODD = [
    "//v1/models",
    "/V1/models",
    "/v1/../metrics",
    "/v1%2fmodels",
    "/v1/models/",
    "/live/",
    "/health/",
    "/",
    "/v1/m?k=1",
    "/deepinfer/test/hook",
]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


@pytest.fixture(scope="module")
def locked() -> Iterator[World]:
    with world(api_keys={"secret-key-1": "one", "secret-key-2": "two"}) as found:
        yield found


def test_a_whole_answer_has_all_choices_and_usage_once(here: World) -> None:
    call = here.chat(n=2, logprobs=True).accept(2)
    call.text("a", "b", logprobs=b'[{"token":"t"}]').text("x", choice=1)
    call.finish("stop").finish("length", choice=1, text="y", cached_tokens=9)
    answer = call.answer()
    found = answer.json()
    assert answer.status == 200
    assert answer.headers["x-deepinfer-route"] == "rank=2; reason=session"
    assert answer.headers["content-type"] == "application/json"
    assert (found["object"], found["model"]) == ("chat.completion", "m")
    assert [choice["message"] for choice in found["choices"]] == [
        {"role": "assistant", "content": "ab"},
        {"role": "assistant", "content": "xy"},
    ]
    assert [choice["finish_reason"] for choice in found["choices"]] == ["stop", "length"]
    assert found["choices"][0]["logprobs"]["content"] == [{"token": "t"}, {"token": "t"}]
    assert found["choices"][1]["logprobs"] is None
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 4, 9)
    assert "deepinfer_prompt_ids" not in found


def test_completions_answer_in_their_own_form(here: World) -> None:
    call = here.completion(model="org/second", logprobs=0).accept(prompt_ids=[7])
    entry = {"token": "t", "token_logprob": -1.0, "top_logprobs": None, "text_offset": 0}
    call.text("t", logprobs=json.dumps([entry]).encode()).finish("stop")
    found = call.answer().json()
    assert (found["object"], found["model"], found["deepinfer_prompt_ids"]) == ("text_completion", "org/second", [7])
    choice = found["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("t", "stop", ["t"])


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("internal_error", 500, "internal_error"),
        ("engine_unavailable", 503, "engine_unavailable"),
        ("request_aborted", 503, "engine_unavailable"),
        ("request_timeout", 504, "request_timeout"),
        ("something new", 500, "internal_error"),
    ],
)
def test_a_failure_of_a_whole_answer_is_an_error_without_choices(
    here: World, code: str, status: int, shown: str
) -> None:
    call = here.chat(n=2).accept(2).text("some text").finish()
    answer = call.fail(code, choice=1).answer()
    assert (answer.status, answer.error["code"]) == (status, shown)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model":"m"}', b'{"model":"none","messages":[]}', b"\xff"])
@pytest.mark.parametrize("path", POST)
def test_a_refused_body_is_400_or_404_with_the_error_object(here: World, path: str, body: bytes) -> None:
    answer = here.post(path, body)
    assert answer.status == (404 if b"none" in body else 400)
    assert answer.error["message"]
    assert here.nothing_ran()


def test_only_plain_json_is_taken(here: World) -> None:
    body = json.dumps(CHAT).encode()
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": ""},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "identity"},
        {"Content-Type": "application/jsonx"},
    ):
        answer = here.post("/v1/chat/completions", body, headers)
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type"), headers
    Call(here, here.begin("/v1/chat/completions", body, {"Content-Type": "Application/JSON; charset=utf-8"}))


def test_models_are_listed_and_described_by_every_served_name(here: World) -> None:
    entries = here.get("/v1/models").json()
    assert entries["object"] == "list"
    assert [entry["id"] for entry in entries["data"]] == ["m", "org/second"]
    for entry in entries["data"]:
        assert (entry["object"], entry["created"]) == ("model", 1_700_000_000)
        assert entry["owned_by"]
    assert here.get("/v1/models/org/second").json() == here.get("/v1/models/org%2Fsecond").json() == entries["data"][1]
    answer = here.get("/v1/models/none")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_unknown_routes_are_404_and_wrong_methods_405_with_allow(here: World) -> None:
    for path in ODD:
        assert here.get(path).error["code"] == "not_found", path
    for path in GET:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            answer = here.request(method, path)
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD"), path
            assert answer.error["code"] == "method_not_allowed"
    for path in POST:
        for method in ("GET", "PUT", "DELETE"):
            answer = here.request(method, path)
            assert (answer.status, answer.headers["allow"]) == (405, "POST")
    head = here.request("HEAD", "/v1/models")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) > 10


def test_without_the_right_key_everything_but_live_and_health_is_401(locked: World) -> None:
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer secret-key"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer"},
        {"Authorization": "secret-key-1"},
        {"Authorization": "Basic secret-key-1"},
        {"Authorization": "Bearer \xe9"},
        {"Authorization": "Bearer secret-key-1 secret-key-2"},
    ]
    for path in [*GET, *POST, *ODD]:
        for method in ("GET", "POST", "HEAD", "DELETE", "OPTIONS"):
            for headers in wrong:
                answer = locked.request(method, path, b"{}" if method == "POST" else None, headers)
                if method == "GET" and path in ("/live", "/health"):
                    assert answer.status == 200
                    continue
                assert answer.status == 401, (method, path, headers)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.error["code"] == "invalid_api_key"
    raw = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nAuthorization: Bearer secret-key-1\r\n"
    assert b" 401 " in locked.raw(raw + b"Connection: close\r\n\r\n").split(b"\r\n")[0]


def test_the_key_names_the_tenant(locked: World) -> None:
    for key, tenant in [("secret-key-1", "one"), ("secret-key-2", "two")]:
        call = Call(locked, locked.begin("/v1/chat/completions", CHAT, {"Authorization": f"bearer {key}"}))
        assert call.generate.tenant == tenant
        call.connection.close()
        assert locked.get("/v1/models", {"Authorization": f"Bearer {key}"}).status == 200


def test_headers_name_the_session_and_the_deadline(here: World) -> None:
    assert here.chat({"X-Session-ID": "s", "X-Correlation-ID": "c"}, session_id="b").generate.session_key == "s"
    assert here.chat({"X-Correlation-ID": "c"}, session_id="b").generate.session_key == "c"
    assert here.chat(session_id="b").generate.session_key == "b"
    call = here.chat({"X-Request-Timeout": "0.3"})
    assert call.generate.timeout == 0.3
    answer = call.answer()  # nobody answers: the frontend itself keeps the deadline
    assert (answer.status, answer.error["code"]) == (504, "request_timeout")
    assert 0.2 < answer.seconds < 2
    for wrong in ("0", "-1", "x", "1e3", "inf", "nan"):
        answer = here.post("/v1/chat/completions", CHAT, {"X-Request-Timeout": wrong})
        assert (answer.status, answer.error["param"]) == (400, "X-Request-Timeout")


def test_each_answer_has_its_own_id_whatever_label_the_client_gives(here: World) -> None:
    calls = [here.chat({"X-Request-Id": "same"}) for _ in range(3)]
    for number, call in enumerate(calls):
        call.accept().finish("stop", text=str(number))
    answers = [call.answer() for call in calls]
    assert [answer.text() for answer in answers] == ["0", "1", "2"]
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["id"] for answer in answers}) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_large_body_travels_unparsed_and_its_shape_comes_back(stream: bool) -> None:
    with world(limits=Limits(inline_body_bytes=1000)) as here:
        call = here.chat({"X-Session-ID": "s"}, stream=stream, n=2, user="u" * 2000)
        assert call.generate.shape is None
        assert (call.generate.route, call.generate.session_key) == ("chat", "s")
        assert json.loads(call.frames[0])["n"] == 2
        shape = shape_of(call.frames[0])
        call.accept(2, shape=shape).finish("stop", text="a").finish("stop", text="b", choice=1)
        if stream:
            read = call.stream(2).read()
            assert (read.text(0), read.text(1)) == ("a", "b")
        else:
            assert call.answer().text(1) == "b"


def shape_of(body: bytes) -> Shape:
    return parse("chat", body, Limits(), ["m"])[1]


def test_health_is_the_router_s_word_and_live_is_our_own(here: World) -> None:
    here.router.mute = True
    for state, status, shown in [
        ("degraded", 200, "degraded"),
        ("down", 503, ""),
        ("loading", 503, ""),
        ("ok", 200, "ok"),
    ]:
        here.router.say(ServiceStatus(state, "", 1, 2, retry_after=7))

        def arrived(state: str = state) -> bool:
            return here.frontend.hub.status is not None and here.frontend.hub.status.state == state

        poll("the status is there", arrived, 5)
        started = time.perf_counter()
        answer = here.get("/health")
        assert time.perf_counter() - started < 0.3
        assert answer.status == status
        if status == 200:
            assert answer.json() == {"status": shown}
        else:
            assert answer.error["code"] == "engine_unavailable"
            assert answer.headers["retry-after"] == "7"
        assert here.get("/live").status == 200
    here.frontend.hub.status_at -= 3.1  # as if the router had been silent for so long
    assert here.get("/health").status == 503
    here.router.mute = False
    poll("it is back", lambda: here.get("/health").status == 200, 5)


def test_pages_come_from_the_router_or_503(here: World) -> None:
    for path, form, kind in [
        ("/metrics", "prometheus", "text/plain"),
        ("/deepinfer/metrics", "json", "application/json"),
    ]:
        connection = here.connect()
        connection.request("GET", path)
        query = here.router.next(MetricsQuery)
        assert query.form == form
        here.router.say(MetricsReply(query.query), b"page of " + form.encode())
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"page of " + form.encode())
        assert (response.getheader("content-type") or "").startswith(kind)
        connection.close()
    started = time.perf_counter()
    assert here.get("/metrics").error["code"] == "engine_unavailable"  # it never answers
    assert 1.9 < time.perf_counter() - started < 4


def test_hooks_reach_an_engine_only_with_test_hooks() -> None:
    with world(test_hooks=True) as here:
        connection = here.begin("/deepinfer/test/hook", {"name": "check_pools", "rank": 1, "args": {"a": 1}})
        hook = here.router.next(Hook)
        assert (hook.name, hook.rank, hook.args) == ("check_pools", 1, {"a": 1})
        here.router.say(HookReply(hook.query, True, {"free": 3}))
        assert json.loads(connection.getresponse().read()) == {"ok": True, "result": {"free": 3}}
        for body in (
            b"[]",
            b"{}",
            b"",
            b'{"name":5}',
            b'{"name":"x","rank":1e9}',
            b'{"name":"x","args":{"a":%d}}' % 2**70,
        ):
            assert here.post("/deepinfer/test/hook", body).error["type"] == "invalid_request_error", body
        call = here.chat(metadata={"deepinfer_hooks": {"script": [1], "dump_prompt": True}})
        assert call.generate.hooks == {"script": [1], "dump_prompt": True}
        assert call.generate.shape is not None
        assert call.generate.shape.dump_prompt


def test_numbers_reach_the_router() -> None:
    with world() as here:
        call = here.chat().accept()
        stats = here.router.next(Stats)
        while stats.gauges["frontend_live_requests"] != 1:
            stats = here.router.next(Stats)
        call.text("a").text("b").finish()
        assert call.answer().status == 200
        while stats.counters.get('http_requests_total{status="200"}', 0) < 1 or stats.gauges["frontend_live_requests"]:
            stats = here.router.next(Stats)
        while not stats.histograms["request_seconds"].total:
            stats = here.router.next(Stats)
        assert sum(stats.histograms["time_to_first_token_seconds"].counts) == 1
        assert sum(stats.histograms["inter_token_seconds"].counts) == 1
        assert 'ipc_gaps_total{process="frontend.0"}' in stats.counters


def test_nobody_logs_what_clients_sent(here: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    marker = "marker-7f3a"
    call = here.chat({"X-Request-Id": marker, "Authorization": f"Bearer {marker}", "X-Session-ID": marker}, user=marker)
    call.accept().fail("internal_error").answer()
    here.post("/v1/chat/completions", f'{{"model":"{marker}'.encode())
    here.raw(f"GET /{marker} HTTP/1.1\r\n{marker} : x\r\n\r\n".encode())
    assert marker not in caplog.text


def test_a_fault_of_ours_is_500_with_the_fixed_text(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Generate:
        raise KeyError("secret words")

    monkeypatch.setattr("frontend.generate.parse", broken)
    answer = here.post("/v1/chat/completions", CHAT)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert here.get("/live").status == 200
