"""Law: what means the same arrives as the same (behaviours 8, 9, 49): messages, roles, parts, session keys."""

from __future__ import annotations

import json
from typing import Any

from api import adopt, parse
from wire.limits import Limits
from wire.messages import Generate, Sampling

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def messages(*given: dict[str, Any]) -> list[dict[str, Any]] | None:
    return generate(messages=list(given)).messages


def generate(**fields: Any) -> Generate:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse("chat", json.dumps(body).encode(), Limits(), ["m"])[0]


def test_parts_join_to_the_one_string_for_every_role() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("system", "developer", "user", "assistant", "tool"):
        assert messages({"role": role, "content": parts}) == messages({"role": role, "content": "ab"})


def test_developer_is_system() -> None:
    assert messages({"role": "developer", "content": "x"}) == messages({"role": "system", "content": "x"})


def test_content_beside_tool_calls_is_null_empty_or_absent_alike() -> None:
    base = {"role": "assistant", "tool_calls": [CALL]}
    expected = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert messages(base) == messages({**base, "content": None}) == messages({**base, "content": ""}) == expected


def test_unknown_fields_of_a_message_do_not_reach_the_template() -> None:
    assert messages({"role": "user", "content": "x", "cache_control": {}, "tool_calls": 5}) == messages(
        {"role": "user", "content": "x"}
    )


def test_a_tool_reaches_the_template_as_it_was_given_without_nulls() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"b": 1, "a": None}}}
    found = generate(tools=[tool]).tools
    assert json.dumps(found) == json.dumps(
        [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": None}}}]
    )


def test_sampling_fields_arrive_as_given() -> None:
    given: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "seed": -(2**63),
        "max_tokens": 7,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
    }
    found = generate(**given, stop="x", logit_bias={"3": -100}).sampling
    assert found == Sampling(**given, stop=["x"], logit_bias={3: -100.0})
    assert generate().sampling == Sampling()


def test_the_session_header_wins_over_the_body_and_long_keys_are_hashed() -> None:
    assert generate(session_id="a", prompt_cache_key="b").session_key == "a"
    assert generate(session_id="", prompt_cache_key="b").session_key == "b"
    long = generate(session_id="k" * 1000).session_key
    assert len(long) == 64
    assert long == generate(session_id="k" * 1000).session_key
    envelope = Generate(rid=256, tenant="t", shape=None, sampling=Sampling(), session_key="head", timeout=2.5)
    found = adopt(generate(session_id="a"), envelope)
    assert (found.rid, found.tenant, found.session_key, found.timeout) == (256, "t", "head", 2.5)
    envelope.session_key = ""
    assert adopt(generate(session_id="a"), envelope).session_key == "a"
