"""The HTTP face keeps its shape whatever a client sends.

1: a schema at the wrong level is refused by name. 2: no JSON body at all gives a 500, a 422 or interpreter text.
6: a connection lives on between requests. 7 (until constrained decoding exists): response_format is refused, never
ignored. 8, 9: the forms of message content are equal. 10: too long a prompt says so. 11: 429 and 503 say when to
come again. 12: models, unknown routes and methods. 15 (input side): null means absent.
"""

from __future__ import annotations

import json
import re
import select
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.harness import SLACK, Service, service

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTES = (CHAT, COMPLETIONS)


def context_length(server: Service) -> int:
    """The context length that the service tells in its refusal of a prompt that is too long."""
    message = server.post(COMPLETIONS, server.prompt_body([5] * 300_000)).error["message"]
    found = re.search(r"maximum context length is (\d+) tokens", message)
    assert found, message
    return int(found[1])


def test_1_schema_at_the_wrong_level_is_refused_by_name(server: Service) -> None:
    body = server.chat_body(response_format={"type": "json_schema", "schema": {"type": "object"}})
    error = server.post(CHAT, body).error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "response_format.json_schema"
    assert error["code"] == "invalid_value"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_7_response_format_is_refused_until_it_works(server: Service, kind: str) -> None:
    form: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        form["json_schema"] = {"name": "answer", "schema": {"type": "object"}}
    answer = server.post(CHAT, server.chat_body(response_format=form))
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("unsupported_parameter", "response_format")


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_7_plain_text_is_a_response_format(server: Service, form: Any) -> None:
    assert server.post(CHAT, server.chat_body(response_format=form, max_tokens=2)).status == 200


# --- 2: any body ------------------------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner))
FIELDS = [
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "user",
    "metadata",
    "echo",
    "best_of",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "session_id",
    "prompt_cache_key",
    "prefix_cache",
    "chat_template_kwargs",
    "request_id",
    "modalities",
    "suffix",
    "chat_template",
    "functions",
]


def check_any(server: Service, path: str, payload: bytes) -> None:
    """A body was served, or refused as the contract says: never 422, never 500, no interpreter text."""
    answer = server.post(path, payload)
    if answer.status == 200:
        return
    assert answer.status in (400, 404), (answer.status, answer.body[:300], payload[:300])
    assert answer.error["type"] == "invalid_request_error"


def wild(value: Any) -> bytes:
    """JSON with the literals NaN and Infinity, as Python writes them; lone surrogates stay escapes."""
    return json.dumps(value).encode()


@pytest.mark.parametrize("path", [*ROUTES, "/deepinfer/test/hook"])
@given(value=VALUES)
def test_2_any_json_at_all_never_gives_500_or_422(server: Service, path: str, value: Any) -> None:
    check_any(server, path, wild(value))


@pytest.mark.parametrize("path", ROUTES)
@given(field=st.sampled_from(FIELDS), value=VALUES)
def test_2_one_wild_field_in_a_good_body(server: Service, path: str, field: str, value: Any) -> None:
    good = server.chat_body(max_tokens=2) if path == CHAT else server.prompt_body("a", max_tokens=2)
    check_any(server, path, wild({**good, field: value}))


@given(
    value=VALUES, key=st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"])
)
def test_2_one_wild_field_in_a_message(server: Service, key: str, value: Any) -> None:
    message = {"role": "assistant", "content": "a", key: value}
    check_any(server, CHAT, wild(server.chat_body(max_tokens=2) | {"messages": [message]}))


@given(key=st.sampled_from(["type", "function", "id", "index"]), value=VALUES)
def test_2_one_wild_field_in_a_tool_call(server: Service, key: str, value: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}, key: value}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    check_any(server, CHAT, wild(server.chat_body(max_tokens=2) | {"messages": messages}))


@given(key=st.sampled_from(["type", "function"]), value=VALUES)
def test_2_one_wild_field_in_a_tool(server: Service, key: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}, key: value}
    check_any(server, CHAT, wild(server.chat_body(max_tokens=2, tools=[tool])))


@pytest.mark.parametrize("path", [*ROUTES, "/deepinfer/test/hook"])
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b" ",
        b"{",
        b"nul",
        b"null",
        b"[]",
        b'"a"',
        b"{}",
        b"\xff\xfe{}",
        b'{"model": "tiny", "messages": []}',
        b'{"model": NaN}',
        b'{"model": "tiny", "messages": Infinity}',
        b'{"model": "tiny", "max_tokens": -Infinity, "prompt": "a"}',
        b'{"model": "tiny", "max_tokens": 1e400, "prompt": "a"}',
        b'{"model": "tiny", "seed": 99999999999999999999999999, "prompt": "a"}',
        b'{"model": "tiny", "prompt": [99999999999999999999999999]}',
        b'{"model": "tiny", "prompt": [[]]}',
        b'{"model": "tiny", "messages": [null]}',
        b'{"model": "tiny", "messages": [{"role": null, "content": [null]}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": null}]}]}',
        b'{"model": "tiny", "messages": [[{"role": "user"}]]}',
        b"[" * 100_000,
        b'{"model": "tiny", "metadata": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"model": "tiny", "prompt": "a\x00b"}',
        b'{"model": "tiny", "prompt": "\xff"}',
    ],
)
def test_2_broken_and_empty_bodies(server: Service, path: str, payload: bytes) -> None:
    answer = server.post(path, payload)
    assert answer.status == 400 or (answer.status == 404 and path not in ROUTES), (answer.status, answer.body)
    assert answer.error


def test_2_a_body_of_more_levels_than_allowed_is_refused(server: Service) -> None:
    def nested(levels: int) -> bytes:
        head = json.dumps(server.prompt_body("a", max_tokens=1))[:-1].encode()
        return head + b', "metadata": ' + b'{"a":' * levels + b"1" + b"}" * (levels + 1)

    assert server.post(COMPLETIONS, nested(60)).status == 200
    assert server.post(COMPLETIONS, nested(64)).error["code"] in ("invalid_json", "invalid_value")


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"Content-Encoding": "gzip"}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/json; charset=utf-8"}, 200, ""),
    ],
)
def test_2_content_types(server: Service, headers: dict[str, str], status: int, code: str) -> None:
    answer = server.post(COMPLETIONS, server.prompt_body("a", max_tokens=1), headers)
    assert answer.status == status
    assert status == 200 or answer.error["code"] == code


def test_2_a_body_above_the_limit_is_refused_as_it_arrives(server: Service) -> None:
    claimed = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    got = server.raw(claimed % (33 << 20) + b'{"prompt": "', timeout=SLACK)
    assert got.startswith(b"HTTP/1.1 413 "), got[:100]
    assert b"request_too_large" in got


# --- 6: keep-alive ----------------------------------------------------------------------------------------------------


def idle_connection_serves(server: Service, seconds: float) -> None:
    connection = server.connect()
    body = server.chat_body(max_tokens=2)
    assert server.request("POST", CHAT, body, connection=connection).status == 200
    used = connection.sock
    readable, _, _ = select.select([used], [], [], seconds)  # the law is about this time itself
    assert not readable, "the server closed an idle connection"
    assert server.request("POST", CHAT, body, connection=connection).status == 200
    assert connection.sock is used
    connection.close()


def test_6_an_idle_connection_is_kept(server: Service) -> None:
    idle_connection_serves(server, 6.5)  # more than the usual default of 5 s


@pytest.mark.long
def test_6_an_idle_connection_is_kept_for_65_seconds(server: Service) -> None:
    idle_connection_serves(server, 65)


def test_6_the_time_is_an_option(folder: Path) -> None:
    with service(folder, "--keepalive-seconds", "1") as server:
        connection = server.connect()
        server.request("GET", "/live", connection=connection)
        started = time.perf_counter()
        readable, _, _ = select.select([connection.sock], [], [], 1 * SLACK + 2)
        assert readable and connection.sock.recv(1) == b"", "an idle connection was kept beyond its time"
        assert time.perf_counter() - started > 0.5
        connection.close()


# --- 8, 9: message content --------------------------------------------------------------------------------------------


def prompt_ids(server: Service, body: dict[str, Any]) -> list[int]:
    """The prompt's token ids, by the dump hook."""
    hooks = {**body.get("metadata", {}).get("deepinfer_hooks", {}), "dump_prompt": True}
    answer = server.post(CHAT if "messages" in body else COMPLETIONS, body | {"metadata": {"deepinfer_hooks": hooks}})
    assert answer.status == 200, answer.body
    ids: list[int] = answer.json()["deepinfer_prompt_ids"]
    assert len(ids) == answer.usage["prompt_tokens"]
    return ids


def test_8_content_of_a_message_with_tool_calls_may_be_null_empty_or_absent(server: Service) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    answers = []
    for content in ({"content": None}, {"content": ""}, {}):
        messages = [
            {"role": "user", "content": "How warm is it in Oslo?"},
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"},
        ]
        answers.append(server.post(CHAT, server.chat_body(max_tokens=8, temperature=0) | {"messages": messages}))
    assert [answer.status for answer in answers] == [200] * 3
    assert len({answer.usage["prompt_tokens"] for answer in answers}) == 1
    assert len({answer.text() for answer in answers}) == 1


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_9_text_parts_are_joined(server: Service, role: str) -> None:
    def ids(content: Any) -> list[int]:
        messages = [{"role": "user", "content": "x"}, {"role": role, "content": content}]
        if role in ("system", "developer"):
            messages.reverse()
        if role == "tool":
            messages[1]["tool_call_id"] = "call_1"
        return prompt_ids(server, server.chat_body(max_tokens=1) | {"messages": messages})

    assert ids([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == ids("ab") != ids("a")


def test_9_developer_is_system(server: Service) -> None:
    def ids(role: str) -> list[int]:
        messages = [{"role": role, "content": "Be short."}, {"role": "user", "content": "x"}]
        return prompt_ids(server, server.chat_body(max_tokens=1) | {"messages": messages})

    assert ids("developer") == ids("system") != ids("user")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": "a"}, {"role": 7, "content": "a"}], "messages[1].role"),
        ([], "messages"),
        (None, "messages"),
        ("hello", "messages"),
    ],
)
def test_9_unknown_roles_and_empty_messages_are_named(server: Service, messages: Any, param: str) -> None:
    answer = server.post(CHAT, {"model": server.model, "messages": messages})
    assert answer.status == 400
    assert answer.error["param"] == param


# --- 10: too long -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("by_prompt", [True, False])
def test_10_too_long_is_said_with_both_numbers(server: Service, path: str, stream: bool, by_prompt: bool) -> None:
    limit = context_length(server)
    words = "word " * (limit + 7 if by_prompt else 5)
    extra: dict[str, Any] = {"stream": stream} | ({} if by_prompt else {"max_tokens": limit})
    body = server.chat_body(words, **extra) if path == CHAT else server.prompt_body(words, **extra)
    answer = server.post(path, body)
    assert answer.status == 400
    error = answer.error
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if path == CHAT else "prompt")
    assert f"maximum context length is {limit} tokens" in error["message"]
    counts = [int(number) for number in re.findall(r"\d+", error["message"])]
    if by_prompt:
        assert [count for count in counts if count > limit], error["message"]
    else:
        short = server.post(path, body | {"max_tokens": 1, "stream": False}).usage["prompt_tokens"]
        assert short in counts, error["message"]


def test_10_the_last_token_of_the_context_can_be_used(server: Service) -> None:
    limit = context_length(server)
    body = server.prompt_body([5] * (limit - 3), max_tokens=3, temperature=0)
    assert server.post(COMPLETIONS, body).usage["completion_tokens"] == 3
    assert server.post(COMPLETIONS, body | {"max_tokens": 4}).error["code"] == "context_length_exceeded"
    assert server.post(COMPLETIONS, body | {"max_tokens": None}).usage["completion_tokens"] <= 3


# --- 11, 12 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_12_models_and_unknown_ones(server: Service, stream: bool) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == [server.model]
    for entry in listed["data"]:
        assert set(entry) >= {"id", "object", "created", "owned_by"}
        assert entry["object"] == "model"
        assert type(entry["created"]) is int
        assert server.get(f"/v1/models/{entry['id']}").json() == entry
    assert server.get("/v1/models/other").error["code"] == "model_not_found"
    for path, body in ((CHAT, server.chat_body(stream=stream)), (COMPLETIONS, server.prompt_body("a", stream=stream))):
        for model in ("other", ""):
            answer = server.post(path, body | {"model": model})
            assert answer.status == 404
            assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")


def test_12_every_served_name_is_listed_and_echoed(folder: Path) -> None:
    with service(folder, "--served-model-name", "first", "org/second") as server:
        names = [entry["id"] for entry in server.get("/v1/models").json()["data"]]
        assert names == ["first", "org/second"]
        for name in names:
            assert server.get(f"/v1/models/{name}").json()["id"] == name
            assert server.post(CHAT, server.chat_body(max_tokens=1) | {"model": name}).json()["model"] == name
            stream = server.stream(CHAT, server.chat_body(max_tokens=2) | {"model": name}).read()
            assert {chunk["model"] for chunk in stream.chunks} == {name}


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/chat", "/favicon.ico", "/v1/embeddings"])
def test_12_unknown_routes(server: Service, path: str) -> None:
    for method in ("GET", "POST"):
        answer = server.request(method, path, b"{}" if method == "POST" else None)
        assert answer.status == 404
        assert answer.error["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", COMPLETIONS, "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("POST", "/live", "GET"),
        ("POST", "/metrics", "GET"),
    ],
)
def test_12_wrong_methods(server: Service, method: str, path: str, allowed: str) -> None:
    answer = server.request(method, path, b"{}" if method in ("POST", "PUT") else None)
    assert answer.status == 405
    assert answer.error["code"] == "method_not_allowed"
    assert allowed in answer.headers["allow"]


def test_12_health_and_live(server: Service) -> None:
    for path in ("/health", "/live"):
        answer = server.get(path)
        assert answer.status == 200
        assert answer.seconds < 0.3 * SLACK
    assert server.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in ("model", "messages", "prompt", "stream")])
def test_null_means_absent(server: Service, field: str) -> None:
    for path, body in ((CHAT, server.chat_body()), (COMPLETIONS, server.prompt_body("hello"))):
        answer = server.post(path, {"max_tokens": 3, "temperature": 0, **body, field: None})
        assert answer.status == 200, (path, answer.body)


def test_unknown_fields_are_ignored(server: Service) -> None:
    assert server.post(CHAT, server.chat_body(max_tokens=1, some_new_field={"a": [1]}, store=True)).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"function_call": "auto"}, "function_call"),
        (CHAT, {"grammar": "root ::= 'a'"}, "grammar"),
        (CHAT, {"guided_json": {}}, "guided_json"),
        (COMPLETIONS, {"guided_regex": "a"}, "guided_regex"),
        (CHAT, {"structured_outputs": {}}, "structured_outputs"),
        (CHAT, {"audio": {}}, "audio"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_known_but_unsupported_fields_are_refused_by_name(
    server: Service, path: str, fields: dict[str, Any], param: str
) -> None:
    body = server.chat_body(**fields) if path == CHAT else server.prompt_body("a", **fields)
    answer = server.post(path, body)
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("unsupported_parameter", param)
    assert server.post(CHAT, server.chat_body(max_tokens=1, modalities=["text"])).status == 200
