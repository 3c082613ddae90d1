"""Law: a body gives a checked request or the contract's error naming the first bad field, and nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import ApiError, parse
from tests.pipeline.laws import INTERPRETER_TEXT
from wire.limits import Limits
from wire.messages import Generate, Shape, decoder, encoder

LIMITS = Limits()
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FIELDS = re.findall(
    r"\w+",
    """
    model messages prompt n best_of temperature top_p top_k min_p presence_penalty frequency_penalty
    repetition_penalty logit_bias seed max_tokens max_completion_tokens min_tokens ignore_eos stop stop_token_ids
    logprobs top_logprobs user metadata session_id prompt_cache_key prefix_cache response_format chat_template_kwargs
    echo suffix stream stream_options tools tool_choice modalities functions guided_json chat_template audio
    """,
)


def read(body: Any, route: str = "chat", hooks: bool = False) -> tuple[Generate, Shape]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(route, raw, LIMITS, ["m"], hooks)


def chat(**fields: Any) -> tuple[Generate, Shape]:
    return read({"model": "m", "messages": [USER], **fields})


def refused(body: Any, route: str = "chat", hooks: bool = False) -> tuple[int, str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        read(body, route, hooks)
    check(caught.value)
    return caught.value.status, caught.value.code, caught.value.param


def check(error: ApiError) -> None:
    body = error.body()
    assert len(body) <= 4096
    assert b"\n" not in body
    found = json.loads(body)["error"]
    assert found["message"]
    assert error.status in (400, 404)
    assert found["type"] == "invalid_request_error"
    assert not any(words in found["message"] for words in INTERPRETER_TEXT)


def chat_refused(**fields: Any) -> tuple[int, str | None, str | None]:
    return refused({"model": "m", "messages": [USER], **fields})


def prompt_refused(**fields: Any) -> tuple[int, str | None, str | None]:
    return refused({"model": "m", "prompt": "hi", **fields}, "completions")


BAD_VALUES: list[tuple[str, list[Any]]] = [
    ("n", [0, -1, 9, 1.0, True, "1", [], 2**70]),
    ("temperature", [-0.1, 2.1, True, "1", [], 10**400]),
    ("top_p", [0, -0.1, 1.1, False]),
    ("top_k", [0, -2, 1.0, True, "5"]),
    ("min_p", [-0.1, 1.1, True]),
    ("presence_penalty", [-2.1, 2.1, True]),
    ("frequency_penalty", [-2.1, 2.1, "0"]),
    ("repetition_penalty", [0, -1, 10.1, True]),
    ("seed", [2**63, -(2**63) - 1, 1.5, True, "7"]),
    ("max_tokens", [0, -1, 1.0, True, "5"]),
    ("min_tokens", [-1, 1.0, True]),
    ("ignore_eos", [1, "true"]),
    ("stop", ["", [""], ["x" * 257], ["a"] * 17, 5, [5], {}]),
    ("stop_token_ids", [[-1], [True], [1.5], [2**40], [1] * 129, 5]),
    (
        "logit_bias",
        [
            {"a": 1},
            {"-1": 1},
            {"1": 101},
            {"1": -101},
            {"1": "x"},
            {"1": True},
            {"1": None},
            {"01": 1},
            {"99999999999": 1},
            {"1.5": 1},
            {str(i): 1 for i in range(301)},
            [],
        ],
    ),
    ("stream", [1, "true"]),
    ("stream_options", [[], 1]),
    ("user", [1, []]),
    ("session_id", [1]),
    ("prompt_cache_key", [1]),
    ("prefix_cache", [1, "no"]),
    ("modalities", ["text", [1]]),
]


@pytest.mark.parametrize(("name", "values"), BAD_VALUES)
def test_a_wrong_type_or_range_names_its_field_on_both_routes(name: str, values: list[Any]) -> None:
    for value in values:
        assert chat_refused(**{name: value}) == (400, "invalid_value", name), value
        assert prompt_refused(**{name: value}) == (400, "invalid_value", name), value


def test_null_is_absent_for_every_optional_field() -> None:
    fields = dict.fromkeys(name for name in FIELDS if name not in ("model", "messages", "prompt"))
    assert chat(**fields) == chat()
    plain = {"model": "m", "prompt": "hi"}
    assert read({**fields, **plain}, "completions") == read(plain, "completions")


def test_unknown_fields_are_ignored() -> None:
    assert chat(surprise={"a": [2**80]}, metadata=7) == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 1),
        ("suffix", "x"),
        ("functions", []),
        ("function_call", "auto"),
        ("chat_template", "{{x}}"),
        ("grammar", "root ::= x"),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("structured_outputs", {}),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("best_of", 2),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
    ],
)
def test_known_and_unsupported_names_are_refused_by_name(field: str, value: Any) -> None:
    assert chat_refused(**{field: value}) == (400, "unsupported_parameter", field)
    assert prompt_refused(**{field: value}) == (400, "unsupported_parameter", field)


def test_what_equals_the_default_of_an_unsupported_name_is_accepted() -> None:
    assert chat(best_of=1, modalities=["text"], response_format={"type": "text"}) == chat()
    assert chat(n=2, best_of=2)[1].n == 2


def test_response_format_is_checked_for_its_shape_before_support() -> None:
    wrong = {"type": "json_schema", "schema": {"type": "object"}}
    assert chat_refused(response_format=wrong) == (400, "invalid_value", "response_format.json_schema")
    assert chat_refused(response_format={"type": "yaml"})[1:] == ("invalid_value", "response_format.type")
    assert chat_refused(response_format={"type": ["text"]})[1:] == ("invalid_value", "response_format.type")
    assert chat_refused(response_format="json")[1:] == ("invalid_value", "response_format")
    big = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"description": "x" * 70000}}}
    assert chat_refused(response_format=big)[1:] == ("invalid_schema", "response_format.json_schema.schema")


def test_the_model_must_be_one_that_is_served() -> None:
    for name in ("", "other", "M"):
        assert refused({"model": name, "messages": [USER]}) == (404, "model_not_found", "model")
    wrong: list[Any] = [None, 5, ["m"]]
    for name in wrong:
        assert refused({"model": name, "messages": [USER]}) == (400, "invalid_value", "model")


def test_an_unpaired_surrogate_anywhere_names_its_field() -> None:
    cases = {
        b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}': "messages[0].content",
        b'{"messages":[{"content":[{"text":"\\ude00x"}]}]}': "messages[0].content[0].text",
        b'{"messages":[{},{"tool_calls":[{"function":{"arguments":"\\ud83d\\ud83d\\ude00"}}]}]}': (
            "messages[1].tool_calls[0].function.arguments"
        ),
        b'{"stop":["a","\\ud83d"]}': "stop[1]",
        b'{"user":"\\udfff"}': "user",
        b'{"metadata":{"secret-name":"\\ud800"}}': "metadata",
        b'{"metadata":{"\\ud800":1}}': "metadata",
        b'{"tools":[{"function":{"parameters":{"type":{"name":"\\ud800"}}}}]}': "tools[0].function.parameters",
        b'{"user":"\xed\xa0\xbd"}': "user",
        b'{"secret-name":"\\ud800"}': None,
    }
    for body, param in cases.items():
        for route in ("chat", "completions"):
            assert refused(body, route) == (400, "invalid_unicode", param), body


def test_a_proper_pair_is_the_one_character() -> None:
    generate, _ = read(b'{"model":"m","messages":[{"role":"user","content":"\\ud83d\\ude00"}]}')
    assert generate.messages == [{"role": "user", "content": "\U0001f600"}]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"[1,]",
        b"nul",
        b'{"a":1}x',
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b'{"a":"\n"}',
        b"{'a':1}",
        b'{"a":01}',
        b'{"a":.5}',
        b'{"a":+1}',
        b'{"a":0x1}',
    ],
)
def test_what_is_not_json_is_invalid_json(body: bytes) -> None:
    assert refused(body) == (400, "invalid_json", None)


def test_nan_and_infinity_are_not_json_and_still_name_their_field() -> None:
    for literal in (b"NaN", b"Infinity", b"-Infinity"):
        assert refused(b'{"model":"m","temperature":' + literal + b"}") == (400, "invalid_json", "temperature")
    start = b'{"model":"m","messages":[{"role":"user","content":"x"}],'
    assert refused(start + b'"temperature":1e999}') == (400, "invalid_value", "temperature")
    assert refused(start + b'"seed":' + b"9" * 5000 + b"}") == (400, "invalid_value", "seed")
    assert read(start + b'"other":1e999}') == chat()[:0] + read(start + b'"other":1}')


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"', b"true"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    assert refused(body) == (400, "invalid_value", None)


def test_depth_64_is_allowed_and_65_is_refused_by_field() -> None:
    inside = json.loads('{"a":' * 60 + "1" + "}" * 60)
    tool = {"type": "function", "function": {"name": "f", "parameters": inside}}
    assert chat(tools=[tool])[0].tools == [tool]  # {} [ {} {} and 60 more: 64
    deeper = {"type": "function", "function": {"name": "f", "parameters": {"a": inside}}}
    assert chat_refused(tools=[deeper]) == (400, "invalid_schema", "tools[0].function.parameters")
    assert chat_refused(metadata=json.loads("[" * 64 + "]" * 64)) == (400, "invalid_value", "metadata")
    for depth in (2000, 200_000):
        assert refused(b'{"model":"m]","metadata":' + b"[" * depth) == (400, "invalid_value", "metadata")
        assert refused(b'{"tools":[{"a":' + b'{"a":' * depth) == (400, "invalid_schema", "tools")
    assert chat(messages=[{"role": "user", "content": "{[" * 5000}])[1] == chat()[1]  # brackets in text do not count


def test_messages_are_checked_by_place() -> None:
    cases: list[tuple[Any, str]] = [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([USER] * 2049, "messages"),
        ([5], "messages[0]"),
        ([USER, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant"}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f g", "arguments": ""}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ]
    for messages, param in cases:
        assert chat_refused(messages=messages) == (400, "invalid_value", param), messages


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "refusal", ""])
def test_a_part_that_is_not_text_is_refused_by_place(kind: str) -> None:
    part = {"type": kind, kind or "x": {"url": "file:///etc/passwd"}}
    messages = [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    assert chat_refused(messages=messages) == (400, "unsupported_content_type", "messages[1].content[1].type")


def test_tools_are_checked_by_place() -> None:
    cases: list[tuple[Any, str]] = [
        ([TOOL] * 129, "tools"),
        ("f", "tools"),
        ([5], "tools[0]"),
        ([TOOL, {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"function": {"name": ""}}], "tools[0].function.name"),
        ([{"function": {"name": "a" * 65}}], "tools[0].function.name"),
        ([{"function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f", "description": 5}}], "tools[0].function.description"),
        ([{"function": {"name": "f", "strict": 1}}], "tools[0].function.strict"),
        ([{"function": {"name": "f", "parameters": {"maximum": 2**65}}}], "tools[0].function"),
    ]
    for tools, param in cases:
        assert chat_refused(tools=tools) == (400, "invalid_value", param), tools
    big = {"function": {"name": "f", "parameters": {"description": "x" * 70_000}}}
    assert chat_refused(tools=[big]) == (400, "invalid_schema", "tools[0].function.parameters")


def test_tool_choice_is_auto_or_none_until_it_can_be_enforced() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[TOOL])[0].tools == chat(tools=[TOOL], tool_choice="auto")[0].tools == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none")[0].tools is None
    assert chat(tools=[])[0].tools is None
    for choice in ("required", named):
        assert chat_refused(tools=[TOOL], tool_choice=choice) == (400, "unsupported_parameter", "tool_choice")
    wrong: list[Any] = ["maybe", 5, []]
    for choice in wrong:
        assert chat_refused(tools=[TOOL], tool_choice=choice) == (400, "invalid_value", "tool_choice")
    assert chat_refused(tool_choice="required") == (400, "invalid_value", "tool_choice")


def test_template_arguments_are_limited_to_the_allowed_names_and_plain_values() -> None:
    good = {"enable_thinking": False, "reasoning_effort": "high"}
    assert chat(chat_template_kwargs=good)[0].template_kwargs == good
    wrong: list[tuple[str, Any]] = [
        ("tools", 1),
        ("enable_thinking", None),
        ("enable_thinking", []),
        ("reasoning_effort", "x" * 65),
    ]
    for name, value in wrong:
        assert chat_refused(chat_template_kwargs={name: value}) == (
            400,
            "invalid_value",
            f"chat_template_kwargs.{name}",
        )
    assert chat_refused(chat_template_kwargs={"a b": 1})[2] == "chat_template_kwargs"
    assert chat_refused(chat_template_kwargs=[1])[2] == "chat_template_kwargs"


def test_logprobs_have_the_route_s_own_form() -> None:
    assert [chat()[0].sampling.logprobs, chat(logprobs=False)[0].sampling.logprobs] == [-1, -1]
    assert [chat(logprobs=True)[0].sampling.logprobs, chat(logprobs=True, top_logprobs=20)[1].logprobs] == [0, 20]
    assert chat_refused(top_logprobs=1)[2] == chat_refused(logprobs=True, top_logprobs=21)[2] == "top_logprobs"
    assert chat_refused(logprobs=1)[2] == "logprobs"
    assert read({"model": "m", "prompt": "x", "logprobs": 5}, "completions")[0].sampling.logprobs == 5
    wrong: list[Any] = [6, -1, True, 1.0]
    for value in wrong:
        assert prompt_refused(logprobs=value)[2] == "logprobs"
    assert prompt_refused(logprobs=0, echo=True) == (400, "unsupported_parameter", "echo")


def test_token_limits_name_the_field_given() -> None:
    assert chat(max_completion_tokens=5)[0].sampling.max_tokens_field == "max_completion_tokens"
    assert chat(max_tokens=5, max_completion_tokens=5)[0].sampling.max_tokens == 5
    assert chat_refused(max_tokens=5, max_completion_tokens=6)[2] == "max_completion_tokens"
    assert chat_refused(max_completion_tokens=0)[2] == "max_completion_tokens"
    assert chat_refused(max_tokens=5, min_tokens=6)[2] == "min_tokens"
    assert chat(max_tokens=2**80)[0].sampling.max_tokens == 2**31 - 1  # above every context: the tokenizer refuses it


@pytest.mark.parametrize(
    "prompt",
    [
        [-1],
        [2**40],
        [2**70],
        [True],
        [1.5],
        [],
        [[]],
        [[1], []],
        ["a", 1],
        [1, "a"],
        [[1], "a"],
        [[True]],
        {},
        5,
        None,
        [None],
    ],
)
def test_a_prompt_of_another_shape_is_refused(prompt: Any) -> None:
    assert prompt_refused(prompt=prompt) == (400, "invalid_value", "prompt")


def test_prompts_of_all_four_shapes_give_their_choices() -> None:
    good: list[tuple[Any, list[Any]]] = [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
    ]
    for prompt, prompts in good:
        generate, shape = read({"model": "m", "prompt": prompt, "n": 3}, "completions")
        assert (generate.prompts, shape.n, shape.prompts) == (prompts, 3 * len(prompts), len(prompts))
    assert prompt_refused(prompt=["a"] * 257) == (400, "invalid_value", "prompt")
    assert prompt_refused(prompt=["a"] * 33, n=8) == (400, "invalid_value", "prompt")


def test_hooks_come_from_metadata_only_when_they_are_allowed() -> None:
    for hooks in ({"script": [1]}, '{"script": [1]}'):
        body = {"model": "m", "messages": [USER], "metadata": {"deepinfer_hooks": hooks}}
        assert read(body)[0].hooks is None
        assert read(body, hooks=True)[0].hooks == {"script": [1]}
    bad: list[Any] = ["{", "[]", 5, {"a": 2**70}]
    for wrong in bad:
        body = {"model": "m", "messages": [USER], "metadata": {"deepinfer_hooks": wrong}}
        assert refused(body, hooks=True) == (400, "invalid_value", "metadata")


# --- any JSON at all ----------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["m", "user", "assistant", "text", "function", "auto", "json_schema", 2**63, -(2**63), 2**64, "\ud83d"]
    )
)
names = st.sampled_from([*FIELDS, "role", "content", "type", "text", "function", "name", "arguments", "tool_calls"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | st.text(max_size=4), inner, max_size=5),
    max_leaves=20,
)


def survives(body: bytes, route: str) -> None:
    for hooks in (False, True):
        try:
            generate, shape = parse(route, body, LIMITS, ["m"], hooks)
        except ApiError as error:
            check(error)
        else:
            assert 1 <= shape.n <= 256
            assert decoder.decode(encoder.encode(generate)) == generate  # it can travel, and says the same there


@given(values, st.sampled_from(["chat", "completions"]))
def test_any_json_value_is_a_request_or_an_error(value: Any, route: str) -> None:
    survives(json.dumps(value).encode(), route)


@given(st.dictionaries(names, values, max_size=4), st.sampled_from(["chat", "completions"]))
def test_any_field_of_a_good_request_may_have_any_value(fields: dict[str, Any], route: str) -> None:
    survives(json.dumps({"model": "m", "messages": [USER], "prompt": "hi", **fields}).encode(), route)


@given(values, st.sampled_from(["user", "assistant", "tool"]))
def test_any_content_and_any_tool_may_come(value: Any, role: str) -> None:
    messages = [{"role": role, "content": value, "tool_calls": value}, value]
    tools = [{"type": "function", "function": {"name": "f", "parameters": value}}, value]
    for cut in (1, 2):
        survives(json.dumps({"model": "m", "messages": messages[:cut], "tools": tools[:cut]}).encode(), "chat")


@given(st.binary(max_size=40), st.integers(0, 60))
def test_any_bytes_may_come(noise: bytes, at: int) -> None:
    body = msgspec.json.encode({"model": "m", "messages": [USER]})
    survives(noise, "chat")
    survives(body[:at] + noise + body[at:], "chat")
