"""What a client may send: every value outside its range is refused at once, by name, with no engine work.

47: token ids of prompts. 48: logit_bias. 49: sampling fields. 86: n and best_of. 87: max_tokens. 89: chat_template.
90: chat_template_kwargs. 91: content types, and nothing is fetched. And the limits listed in the contract.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from tests.pipeline.harness import SLACK, Service

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
AT_ONCE = 0.1 * SLACK


@pytest.fixture(scope="session")
def vocabulary(shared_service: Service) -> int:
    """V, found by its law: the greatest id that is accepted, plus 1."""
    config = json.loads((shared_service.model_dir / "config.json").read_text())
    return int(config["vocab_size"])


def refused(server: Service, path: str, fields: dict[str, Any], param: str, code: str = "invalid_value") -> None:
    """400 at once, naming the field, and no engine has heard of it."""
    body = server.chat_body() if path == CHAT else server.prompt_body("a")
    for stream in (False, True):
        answer = server.post(path, body | fields | {"stream": stream})
        assert answer.status == 400, (fields, answer.status, answer.body[:200])
        assert answer.error["param"] == param, answer.error
        assert answer.error["code"] == code, answer.error
        assert answer.seconds < AT_ONCE


def same_engine(server: Service) -> list[int]:
    return [child.pid for child in server.children("engine")]


# --- 47, 48 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", [[-1], "V", [2**40], [2**70], [True], [1.5], [], [[1], []], [[1], [-1]], [1, "a"], [None]]
)
def test_47_ids_that_are_no_ids_are_refused(server: Service, vocabulary: int, bad: Any) -> None:
    engines = same_engine(server)
    refused(server, COMPLETIONS, {"prompt": [vocabulary] if bad == "V" else bad}, "prompt")
    assert same_engine(server) == engines
    assert server.post(COMPLETIONS, server.prompt_body([1, 2], max_tokens=1)).status == 200


def test_47_the_last_id_is_accepted(server: Service, vocabulary: int) -> None:
    assert server.post(COMPLETIONS, server.prompt_body([vocabulary - 1], max_tokens=1)).status == 200
    refused(server, COMPLETIONS, {"prompt": [1, 2, vocabulary]}, "prompt")


@pytest.mark.parametrize("prompt", ["abc", ["abc", "de"], [1, 2, 3], [[1, 2], [3]]])
def test_47_forms_of_a_prompt(server: Service, prompt: Any) -> None:
    answer = server.post(COMPLETIONS, server.prompt_body(prompt, max_tokens=2))
    count = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(count))
    server.stream(COMPLETIONS, server.prompt_body(prompt, max_tokens=2, n=2)).read()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "bias",
    [
        {"-1": 1},
        {"V": 1},
        {"1.0": 1},
        {" 1": 1},
        {"0x1": 1},
        {"a": 1},
        {"": 1},
        {"\u0661": 1},
        {"99999999999999999999999": 1},
        {"1": 100.5},
        {"1": -101},
        {"1": "1"},
        {"1": None},
        {"1": True},
        {"1": float("nan")},
        {"1": float("inf")},
        {str(token): 0 for token in range(301)},
        [1],
        "a",
    ],
    ids=lambda bias: json.dumps(bias)[:24],
)
def test_48_logit_bias(server: Service, vocabulary: int, path: str, bias: Any) -> None:
    engines = same_engine(server)
    if isinstance(bias, dict) and "V" in bias:
        bias = {str(vocabulary): 1}
    body = {"logit_bias": bias}
    code = "invalid_json" if "nan" in repr(bias) or "inf" in repr(bias) else "invalid_value"
    if code == "invalid_json":  # NaN and Infinity are no JSON: either refusal is right
        good = server.chat_body() if path == CHAT else server.prompt_body("a")
        answer = server.post(path, good | body)
        assert answer.status == 400
        assert answer.error["code"] in ("invalid_json", "invalid_value")
    else:
        refused(server, path, body, "logit_bias")
    assert same_engine(server) == engines


def test_48_good_logit_bias(server: Service, vocabulary: int) -> None:
    for bias in ({}, {"0": 100, str(vocabulary - 1): -100, "3": 0.5}, {str(token): 1 for token in range(300)}):
        assert server.post(CHAT, server.chat_body(max_tokens=1, logit_bias=bias)).status == 200


# --- 49 ---------------------------------------------------------------------------------------------------------------

SAMPLING = [
    ("temperature", [-0.1, 2.1, "1", True, [], {}]),
    ("top_p", [0, -0.1, 1.01, "1", True]),
    ("top_k", [0, -2, 1.5, "4", True]),
    ("min_p", [-0.1, 1.1, "0", True]),
    ("presence_penalty", [-2.1, 2.1, "0", True]),
    ("frequency_penalty", [-2.1, 2.1, "0", True]),
    ("repetition_penalty", [0, -1, 10.1, "1", True]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "1", True]),
    ("min_tokens", [-1, 1.5, "1", True]),
    ("ignore_eos", [1, "yes"]),
    ("stream", [1, "yes"]),
    ("prefix_cache", [1, "yes"]),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in SAMPLING for value in values])
def test_49_sampling_fields_outside_their_range(server: Service, path: str, field: str, value: Any) -> None:
    if field == "stream":
        body = server.chat_body() if path == CHAT else server.prompt_body("a")
        answer = server.post(path, body | {"stream": value})
        assert (answer.status, answer.error["param"]) == (400, "stream")
        return
    refused(server, path, {field: value}, field)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "field", [field for field, values in SAMPLING if -0.1 in values or -2.1 in values or -1 in values]
)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_49_non_finite_numbers(server: Service, path: str, field: str, number: str) -> None:
    body = server.chat_body() if path == CHAT else server.prompt_body("a")
    answer = server.post(path, json.dumps(body)[:-1].encode() + f', "{field}": {number}}}'.encode())
    assert answer.status == 400
    if answer.error["code"] != "invalid_json":
        assert answer.error["param"] == field


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"temperature": 1e-6},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 1},
        {"top_k": 10_000_000},
        {"min_p": 0},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 10},
        {"repetition_penalty": 0.01},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"seed": 0},
    ],
    ids=json.dumps,
)
def test_49_the_edges_are_inside(server: Service, fields: dict[str, Any]) -> None:
    for path, body in ((CHAT, server.chat_body()), (COMPLETIONS, server.prompt_body("a"))):
        assert server.post(path, body | {"max_tokens": 2} | fields).status == 200


# --- 86, 87 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [0, -1, 9, 1.5, "2", True, False, [1], 2**70])
def test_86_n(server: Service, path: str, n: Any) -> None:
    refused(server, path, {"n": n}, "n")


@pytest.mark.parametrize("best_of", [2, 0, True, "1", 1.5])
def test_86_best_of(server: Service, best_of: Any) -> None:
    code = "unsupported_parameter" if best_of == 2 and type(best_of) is int else "invalid_value"
    answer = server.post(COMPLETIONS, server.prompt_body("a", n=1, best_of=best_of))
    assert (answer.status, answer.error["param"]) == (400, "best_of")
    assert answer.error["code"] in (code, "unsupported_parameter")
    assert server.post(COMPLETIONS, server.prompt_body("a", n=2, best_of=2, max_tokens=1)).status == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_86_choices_are_indexed_and_the_prompt_counts_once(server: Service, path: str, n: int) -> None:
    body = server.chat_body("count me") if path == CHAT else server.prompt_body("count me")
    single = server.post(path, body | {"max_tokens": 4}).usage
    answer = server.post(path, body | {"max_tokens": 4, "n": n})
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(n))
    assert answer.usage["prompt_tokens"] == single["prompt_tokens"]
    assert answer.usage["completion_tokens"] == 4 * n
    assert answer.usage["total_tokens"] == single["prompt_tokens"] + 4 * n


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, [5], {}])
@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETIONS, "max_tokens")]
)
def test_87_max_tokens(server: Service, path: str, field: str, value: Any) -> None:
    refused(server, path, {field: value}, field)


@pytest.mark.parametrize("value", [10**6, 2**31, 2**63, 2**70])
@pytest.mark.parametrize(
    ("path", "field", "place"),
    [
        (CHAT, "max_tokens", "messages"),
        (CHAT, "max_completion_tokens", "messages"),
        (COMPLETIONS, "max_tokens", "prompt"),
    ],
)
def test_87_more_than_the_context(server: Service, path: str, field: str, place: str, value: int) -> None:
    body = server.chat_body() if path == CHAT else server.prompt_body("a")
    answer = server.post(path, body | {field: value})
    assert answer.status == 400
    if value < 2**63:
        assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", place)
    else:
        assert answer.error["param"] in (place, field)


def test_87_both_fields(server: Service) -> None:
    answer = server.post(CHAT, server.chat_body(max_tokens=3, max_completion_tokens=4))
    assert answer.status == 400
    assert answer.error["param"] in ("max_tokens", "max_completion_tokens")
    answer = server.post(CHAT, server.chat_body(max_tokens=3, max_completion_tokens=3))
    assert answer.usage["completion_tokens"] == 3
    answer = server.post(CHAT, server.chat_body(max_tokens=None, max_completion_tokens=4))
    assert answer.usage["completion_tokens"] == 4


# --- 89, 90, 91 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["{{ 1 }}", "", 7, ["a"]])
def test_89_chat_template(server: Service, template: Any) -> None:
    refused(server, CHAT, {"chat_template": template}, "chat_template", "unsupported_parameter")


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"enable_thinking": {}}, "chat_template_kwargs.enable_thinking"),
        ({"enable_thinking": [True]}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_effort": "x" * 65}, "chat_template_kwargs.reasoning_effort"),
        ({"enable_thinking": True, "add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt"),
        ("x", "chat_template_kwargs"),
        ([], "chat_template_kwargs"),
    ],
)
def test_90_chat_template_kwargs(server: Service, kwargs: Any, param: str) -> None:
    refused(server, CHAT, {"chat_template_kwargs": kwargs}, param)


@pytest.mark.parametrize(
    "kwargs", [{}, {"enable_thinking": False}, {"reasoning_effort": "high"}, {"reasoning_effort": 3}]
)
def test_90_allowed_kwargs(server: Service, kwargs: dict[str, Any]) -> None:
    assert server.post(CHAT, server.chat_body(max_tokens=1, chat_template_kwargs=kwargs)).status == 200


@pytest.fixture
def canary() -> Any:
    """A listener that remembers whether anybody connected: (port, touched)."""
    touched = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            try:
                listener.accept()[0].close()
            except OSError:
                return
            touched.set()

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield listener.getsockname()[1], touched
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "input_text", "", 7, None])
def test_91_only_text_parts(server: Service, canary: tuple[int, threading.Event], kind: Any) -> None:
    port, touched = canary
    for url in (f"http://127.0.0.1:{port}/a.png", "file:///etc/hostname", "data:image/png;base64,AA==", "x"):
        part = {"type": kind, str(kind): {"url": url, "data": url, "file_data": url}}
        messages = [
            {"role": "system", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, part]},
        ]
        answer = server.post(CHAT, {"model": server.model, "messages": messages})
        assert answer.status == 400
        assert answer.error["param"] == "messages[1].content[1].type"
        assert answer.error["code"] == ("unsupported_content_type" if kind not in (None, 7) else answer.error["code"])
    assert not touched.is_set()


# --- the contract's other limits --------------------------------------------------------------------------------------


def tool(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"stop_token_ids": 4}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"messages": [{"role": "user", "content": "a"}] * 2049}, "messages"),
        ({"tools": [tool(f"f{index}") for index in range(129)]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("ok"), tool("x" * 65)]}, "tools[1].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool(None)]}, "tools[0].function.name"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_limits_of_chat_fields(server: Service, fields: dict[str, Any], param: str) -> None:
    refused(server, CHAT, fields, param)


@pytest.mark.parametrize("logprobs", [-1, 6, True, "1", 1.5])
def test_limits_of_completions_logprobs(server: Service, logprobs: Any) -> None:
    refused(server, COMPLETIONS, {"logprobs": logprobs}, "logprobs")


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["\u2603" * 256] * 16},
        {"stop": "x" * 256},
        {"stop_token_ids": list(range(3, 131))},
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 0},
        {"logprobs": True},
        {"tools": [tool(f"f-{index}_A") for index in range(128)]},
        {"tools": [tool("x" * 64)]},
        {"tools": []},
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_the_limits_themselves_are_allowed(server: Service, fields: dict[str, Any]) -> None:
    answer = server.post(CHAT, server.chat_body(max_tokens=1) | fields)
    assert answer.status == 200 or answer.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_shape_of_their_route(server: Service, stream: bool) -> None:
    chat = server.chat_body(max_tokens=4, logprobs=True, top_logprobs=2, temperature=0)
    completions = server.prompt_body("abc", max_tokens=4, logprobs=2, temperature=0)
    if stream:
        entries: list[dict[str, Any]] = []
        for chunk in server.stream(CHAT, chat).read().chunks:
            for choice in chunk["choices"]:
                entries += (choice.get("logprobs") or {}).get("content") or []
    else:
        entries = server.post(CHAT, chat).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
    if stream:
        tokens: list[str] = []
        for chunk in server.stream(COMPLETIONS, completions).read().chunks:
            for choice in chunk["choices"]:
                tokens += (choice.get("logprobs") or {}).get("tokens") or []
    else:
        found = server.post(COMPLETIONS, completions).json()["choices"][0]["logprobs"]
        assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        tokens = found["tokens"]
    assert len(tokens) == 4
