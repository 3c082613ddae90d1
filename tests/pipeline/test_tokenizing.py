"""Text in and out: exact ids on the way in, whole characters on the way out.

26, 27: deltas end between characters; a character cut off at the end is left out. 28: nothing of one answer is in
another. 29: stop strings. 30: unpaired surrogates are refused by name. 31: the text of a special token is text.
32: one BOS, and the reference library's prompt. 33: large bodies do not hold up others.
"""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.pipeline.harness import SLACK, TINY, Service, model_copy, service
from tests.pipeline.web import poll, together

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = [
    "plain words, nothing else",
    "naïve café — “quoted” … €5",
    "family \U0001f468‍\U0001f469‍\U0001f467‍\U0001f466 and flag \U0001f1f3\U0001f1f4\U0001f1ef\U0001f1f5",
    "한국어 문장과 日本語の文",
    "العربية مع تشكيل: مُحَمَّد",
    "e\u0301 a\u0308\u0304 combining \u0915\u094d\u0937",
    "\U0001f44d\U0001f3fd\U0001f680\U0001f9d1\U0001f3fe‍\U0001f4bb",
    "  two spaces\n\n\ttabs and lines  ",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The reference tokenizer of the tiny model."""
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def scripted(server: Service, ids: list[int], per_step: int = 1, **fields: Any) -> dict[str, Any]:
    """A chat request that the mock engine answers with `ids`, `per_step` of them a step."""
    return server.chat_body(hooks={"script": ids, "tokens_per_step": per_step}, **fields)


# --- 26, 27: detokenising ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_26_deltas_are_whole_characters(server: Service, tokenizer: Tokenizer, text: str, per_step: int) -> None:
    ids = ids_of(tokenizer, text)
    stream = server.stream(CHAT, scripted(server, ids, per_step, stream_options={"include_usage": True})).read()
    assert stream.text() == tokenizer.decode(ids, skip_special_tokens=False) == text
    assert not [delta for delta in stream.deltas() if "\ufffd" in delta]
    assert stream.finish_reason() == "stop"
    assert stream.usage["completion_tokens"] == len(ids) + 1  # the EOS that ended it counts
    assert server.post(CHAT, scripted(server, ids, per_step)).text() == text


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=24),
    step=st.integers(1, 5),
)
def test_26_any_text(server: Service, tokenizer: Tokenizer, text: str, step: int) -> None:
    ids = ids_of(tokenizer, text)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    stream = server.stream(CHAT, scripted(server, ids, step)).read()
    assert stream.text() == whole
    assert "\ufffd" not in stream.text()


@pytest.mark.parametrize("ending", ["limit", "eos", "stop_token"])
@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize("mode", ["stream", "whole"])
def test_27_a_character_cut_at_the_end_is_left_out(
    server: Service, tokenizer: Tokenizer, ending: str, kept: int, mode: str
) -> None:
    head, character = ids_of(tokenizer, "ok "), ids_of(tokenizer, "\U00012000")
    assert len(character) == 4, "this character must be made of single bytes in the tiny tokenizer"
    fields: dict[str, Any] = {}
    ids, reason = head + character[:kept], "stop"
    expected = len(ids) + 1
    if ending == "limit":
        ids, fields, reason, expected = head + character, {"max_tokens": len(head) + kept}, "length", len(head) + kept
    if ending == "stop_token":
        stop = ids_of(tokenizer, "Q")
        ids, fields = ids + stop + head, {"stop_token_ids": stop}
    body = scripted(server, ids, **fields)
    if mode == "stream":
        stream = server.stream(CHAT, body | {"stream_options": {"include_usage": True}}).read()
        found, usage, finish = stream.text(), stream.usage, stream.finish_reason()
    else:
        answer = server.post(CHAT, body)
        assert answer.status == 200
        found, usage, finish = answer.text(), answer.usage, answer.json()["choices"][0]["finish_reason"]
    assert (found, finish, usage["completion_tokens"]) == ("ok ", reason, expected)


def test_26_tokens_without_text_under_ignore_eos_show_one_replacement(server: Service, tokenizer: Tokenizer) -> None:
    half = ids_of(tokenizer, "\U00012000")[:2]
    answer = server.post(CHAT, scripted(server, half, ignore_eos=True, max_tokens=2))
    assert answer.text() == "\ufffd"


# --- 28 ---------------------------------------------------------------------------------------------------------------


def test_28_the_same_client_id_again(server: Service) -> None:
    headers = {"X-Request-Id": "same-id"}
    body = server.chat_body("tell me", max_tokens=30, temperature=0, request_id="same-id")
    answers = [server.post(CHAT, body, headers) for _ in range(2)]
    stream = server.stream(CHAT, body | {"max_tokens": 1000, "metadata": {"deepinfer_hooks": {"step_ms": 5}}}, headers)
    stream.first_token()
    stream.close()
    answers.append(server.post(CHAT, body, headers))
    assert len({answer.text() for answer in answers}) == 1
    assert len({answer.json()["id"] for answer in answers}) == 3
    server.idle()
    assert server.metrics().total("tokenizer_live_requests") == 0


# --- 29: stop strings -------------------------------------------------------------------------------------------------

FOX = "The quick brown fox jumps over the lazy dog. "


@pytest.mark.parametrize("per_step", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_29_a_stop_string_ends_the_text_before_it(
    server: Service, tokenizer: Tokenizer, path: str, per_step: int
) -> None:
    script = ids_of(tokenizer, FOX * 5)
    hooks = {"script": script, "tokens_per_step": per_step}
    body = server.chat_body(hooks=hooks) if path == CHAT else server.prompt_body("x", hooks=hooks)
    for stop in (["own fox"], "own fox", ["zebra", "own fox", "dog"], ["own fox jumps", "own fox"]):
        stream = server.stream(path, body | {"stop": stop, "stream_options": {"include_usage": True}}).read()
        whole = server.post(path, body | {"stop": stop})
        assert stream.text() == whole.text() == "The quick br"
        assert stream.finish_reason() == whole.json()["choices"][0]["finish_reason"] == "stop"
        assert stream.usage["completion_tokens"] == whole.usage["completion_tokens"]
        completing = next(count for count in range(len(script) + 1) if "own fox" in tokenizer.decode(script[:count]))
        assert whole.usage["completion_tokens"] == completing


def test_29_text_that_only_looks_like_a_stop_string_is_not_lost(server: Service, tokenizer: Tokenizer) -> None:
    text = "abcabcabd abcab"
    stream = server.stream(CHAT, scripted(server, ids_of(tokenizer, text), stop=["abcabcabcx", "abcabz"])).read()
    assert stream.text() == text
    assert stream.finish_reason() == "stop"


def test_29_generation_ends_soon_after_the_match(server: Service, tokenizer: Tokenizer) -> None:
    step_ms = 100
    body = scripted(server, ids_of(tokenizer, FOX * 20), stop=["own fox"])
    body["metadata"]["deepinfer_hooks"]["step_ms"] = step_ms
    assert server.post(CHAT, body).text() == "The quick br"
    started = time.perf_counter()
    poll("the engine has let go", lambda: server.metrics().total("requests_running") == 0, 5, 0.01)
    # 4 steps, and up to 250 ms until the metrics tell
    assert time.perf_counter() - started < 4 * step_ms / 1000 + 0.25 + 0.5


# --- 30: unpaired surrogates ------------------------------------------------------------------------------------------


def with_lone_surrogate(value: Any, escape: str) -> bytes:
    return json.dumps(value).replace("LONE", escape).encode()


@pytest.mark.parametrize("escape", ["\\ud83d", "\\ude00", "a\\ud83db", "\\ude00\\ud83d"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "LONE"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "LONE"}]}]},
            "messages[0].content[0].text",
        ),
        ({"stop": ["ok", "LONE"]}, "stop"),
        ({"stop": "LONE"}, "stop"),
        ({"user": "LONE"}, "user"),
        ({"metadata": {"a": "LONE"}}, "metadata"),
        ({"metadata": {"LONE": "a"}}, "metadata"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "LONE"}'}}
                        ],
                    },
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": "LONE"}}]},
            "tools[0].function.description",
        ),
        ({"some_unknown_field": ["LONE"]}, "some_unknown_field"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_30_unpaired_surrogates(server: Service, fields: dict[str, Any], param: str, escape: str) -> None:
    pids = sorted(child.pid for child in server.children())
    answer = server.post(CHAT, with_lone_surrogate(server.chat_body(max_tokens=1) | fields, escape))
    assert answer.status == 400
    assert answer.error["code"] == "invalid_unicode"
    named = answer.error["param"]  # the name of an unknown field is input, too: it may be left out
    assert (named or "some_unknown_field").startswith(re.split(r"[.\[]", param)[0]), answer.error
    assert sorted(child.pid for child in server.children()) == pids


def test_30_a_proper_pair_is_one_character(server: Service) -> None:
    escaped = with_lone_surrogate(
        server.prompt_body("LONE", hooks={"dump_prompt": True}, max_tokens=1), "\\ud83d\\ude00"
    )
    plain = json.dumps(
        server.prompt_body("\U0001f600", hooks={"dump_prompt": True}, max_tokens=1), ensure_ascii=False
    ).encode()
    ids = [server.post(COMPLETIONS, body).json()["deepinfer_prompt_ids"] for body in (escaped, plain)]
    assert ids[0] == ids[1]
    answer = server.post(COMPLETIONS, with_lone_surrogate(server.prompt_body("LONE"), "\\ud83d"))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_unicode", "prompt")


# --- 31, 32: prompts --------------------------------------------------------------------------------------------------


def special_ids(tokenizer: Tokenizer) -> dict[int, str]:
    return {key: added.content for key, added in tokenizer.get_added_tokens_decoder().items() if added.special}


def prompt_ids(server: Service, body: dict[str, Any]) -> list[int]:
    body = body | {"max_tokens": 1, "metadata": {"deepinfer_hooks": {"dump_prompt": True}}}
    answer = server.post(CHAT if "messages" in body else COMPLETIONS, body)
    assert answer.status == 200, answer.body
    ids: list[int] = answer.json()["deepinfer_prompt_ids"]
    assert len(ids) == answer.usage["prompt_tokens"]
    return ids


def test_31_the_text_of_a_special_token_is_text(server: Service, tokenizer: Tokenizer) -> None:
    special = special_ids(tokenizer)
    assert special

    def count(filling: str) -> int:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": filling})}}
        body = {
            "model": server.model,
            "messages": [
                {"role": "system", "content": f"a {filling} b"},
                {"role": "user", "content": filling},
                {"role": "assistant", "content": f"{filling}{filling}", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": f"x{filling}"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": filling[:3]}, {"type": "text", "text": filling[3:]}],
                },
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": filling}}],
        }
        return sum(token in special for token in prompt_ids(server, body))

    plain = count("plain words")
    for text in special.values():
        assert count(text) == plain, text
        assert count(f" {text}\n{text}") == plain, text


def test_31_a_completion_prompt_is_text_too(server: Service, tokenizer: Tokenizer) -> None:
    special = special_ids(tokenizer)
    for text in special.values():
        ids = prompt_ids(server, server.prompt_body(f"a{text}b"))
        assert sum(token in special for token in ids) == sum(
            token in special for token in prompt_ids(server, server.prompt_body("a"))
        )


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "한국어 \U0001f600 naïve"}],
    [
        {"role": "user", "content": "  leading and trailing  \n"},
        {"role": "assistant", "content": "Yes.\n\nNo."},
        {"role": "user", "content": "123 4567 ..."},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_32_prompts_equal_the_reference(server: Service, messages: list[dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(TINY))
    expected = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert prompt_ids(server, {"model": server.model, "messages": messages}) == list(expected)


@pytest.mark.parametrize("adds", [True, False])
def test_32_there_is_exactly_one_bos(folder: Path, adds: bool) -> None:
    """The tokenizer's post-processor adds BOS (or not), and the template writes it."""
    from transformers import AutoTokenizer

    model = model_copy(folder.parent / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    bos = settings.get("bos_token") or special_ids(Tokenizer.from_file(str(model / "tokenizer.json")))[0]
    bos = bos["content"] if isinstance(bos, dict) else bos
    raw = json.loads((model / "tokenizer.json").read_text())
    bos_id = next(token["id"] for token in raw["added_tokens"] if token["content"] == bos)
    if adds:
        piece = {"SpecialToken": {"id": bos, "type_id": 0}}
        raw["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }
        (model / "tokenizer.json").write_text(json.dumps(raw))
    template = model / "chat_template.jinja"
    text = template.read_text() if template.exists() else settings["chat_template"]
    settings |= {"bos_token": bos, "add_bos_token": adds}
    if template.exists():
        template.write_text("{{ bos_token }}" + text)
    else:
        settings["chat_template"] = "{{ bos_token }}" + text
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = AutoTokenizer.from_pretrained(str(model)).apply_chat_template(
        CONVERSATIONS[0], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    with service(folder, model=model) as server:
        ids = prompt_ids(server, {"model": server.model, "messages": CONVERSATIONS[0]})
        assert ids[0] == bos_id
        assert bos_id not in ids[1:]
        assert ids == list(expected)
        assert (prompt_ids(server, server.prompt_body("abc"))[0] == bos_id) == adds


# --- 33: large bodies -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service whose context takes a body near the size limit."""
    folder = tmp_path_factory.mktemp("roomy")
    model = model_copy(folder / "model", TINY, max_position_embeddings=2_097_152)
    with service(folder / "service", "--device-blocks", "16384", model=model) as found:
        yield found


@pytest.mark.parametrize("megabytes", [6, pytest.param(30, marks=pytest.mark.long)])
def test_33_a_large_body_does_not_hold_up_others(roomy: Service, megabytes: int) -> None:
    line = "A line of ordinary prose, number %d, as an agent would send it back.\n"
    lines = "".join(line % number for number in range(megabytes * 1_000_000 // 70))
    body = json.dumps(roomy.chat_body(lines, max_tokens=1)).encode()
    over, slow = threading.Event(), []

    def watch() -> float:
        while not over.is_set():
            slow.append(roomy.get("/live").seconds)
            over.wait(0.05)
        return max(slow)

    def other() -> float:
        stream = roomy.stream(CHAT, roomy.chat_body(hooks={"step_ms": 20}, max_tokens=100_000))
        stream.first_token()
        while not over.is_set():
            stream.next_line()
        stream.close()
        gaps = [later - before for before, later in zip(stream.times, stream.times[1:], strict=False)]
        return max(gaps)

    def large() -> float:
        answer = roomy.post(CHAT, body, timeout=200)
        over.set()
        assert answer.status in (200, 400), answer.body[:200]
        assert answer.status == 200 or answer.error["code"] == "context_length_exceeded"
        return answer.seconds

    longest, gap, _ = together([watch, other, large])
    assert longest < 0.25 * SLACK, longest
    assert gap < 0.5 * SLACK, gap


def test_33_far_too_many_characters_are_refused_before_encoding(server: Service) -> None:
    body = server.chat_body("x" * 20_000_000)
    answer = server.post(CHAT, body)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert answer.seconds < 0.5 * SLACK
