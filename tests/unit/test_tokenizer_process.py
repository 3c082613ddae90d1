"""The tokenizer process between a frontend and a router, over real links (10, 14, 27-29, 33, 41, 47, 87).

Each request ends with exactly one terminal event, whatever ends it, and nothing of it stays behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from tests.unit.tokenizer_world import TINY, VOCABULARY, World, world
from wire.child import Control
from wire.keys import block_keys, root_key
from wire.messages import (
    Abort,
    Accepted,
    Generate,
    Rejected,
    Sampling,
    SequenceLogprobs,
    TokenLogprobs,
)

REFERENCE = Tokenizer.from_file(str(TINY / "tokenizer.json"))
FOX = "The quick brown fox jumps over the lazy dog. "


def ids_of(text: str) -> list[int]:
    ids: list[int] = REFERENCE.encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("t")) as found:
        found.publish()
        yield found
        assert not found.tokenizer.service.table.requests


def test_without_an_engine_a_request_is_refused_at_once(tmp_path: Path) -> None:
    with world(tmp_path) as found:
        generate = found.ask()
        (refusal,) = found.at(found.at_frontend, Rejected)
        assert (refusal.rid, refusal.status, refusal.code) == (generate.rid, 503, "engine_unavailable")
        assert refusal.retry_after >= 1
        assert not found.tokenizer.service.table.requests


def test_a_chat_goes_in_and_its_text_comes_back(place: World) -> None:
    generate = place.ask(sampling=Sampling(max_tokens=20, seed=5), session_key="s", user="u", timeout=3.0)
    ((submit, ids, keys),) = place.submits()
    assert REFERENCE.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (submit.sid, submit.n, submit.params.max_tokens, submit.params.seed) == (generate.rid, 1, 20, 5)
    assert (submit.session_key, submit.user, len(submit.first_hash)) == ("s", "u", 16)
    assert 2.5 < submit.timeout <= 3.0
    assert keys == b""  # no full block
    place.accept(generate.rid)
    place.at(place.at_frontend, Accepted)
    script = ids_of("Hi, naïve \U0001f680 world")
    for offset, number in enumerate(script):
        place.step(generate.rid, offset, [number])
        place.turn()
    place.step(generate.rid, len(script), [2], "stop", stop_id=2)
    deltas = place.until_end(generate.rid)
    assert "".join(delta.text for delta in deltas) == "Hi, naïve \U0001f680 world"
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert (deltas[-1].finish_reason, deltas[-1].tokens) == ("stop", len(script) + 1)
    assert deltas[-1].usage is not None and deltas[-1].usage.cached_tokens == 128
    (accepted,) = place.at(place.at_frontend, Accepted)
    assert (accepted.rank, accepted.reason, accepted.prompt_tokens) == (2, "least-loaded", len(ids))
    assert accepted.prompt_ids == ids and accepted.shape is None


def test_keys_are_the_chain_under_the_tenants_root(place: World) -> None:
    ids = [number % VOCABULARY for number in range(300)]
    place.ask(route="completions", prompts=[ids], sampling=Sampling(max_tokens=1))
    ((_, sent, keys),) = place.submits()
    raw = b"".join(number.to_bytes(4, "little") for number in ids)
    expected = block_keys(root_key(b"c" * 32, "d" * 64, "fp32/test", ""), raw, 128)
    assert sent == ids and keys == b"".join(expected) and len(expected) == 2
    place.tokenizer.service.lose_router()


def test_several_prompts_and_choices(place: World) -> None:
    generate = place.ask(n=4, route="completions", prompts=["abc", "defg hi"], echo=True)
    submits = place.submits(2)
    assert [(submit.sid - generate.rid, submit.n) for submit, _, _ in submits] == [(0, 2), (2, 2)]
    sids = [generate.rid | choice for choice in range(4)]
    place.accept(*sids)
    for sid in reversed(sids):
        place.step(sid, 0, ids_of("X"), "length")
    texts = ["".join(delta.text for delta in place.until_end(sid)) for sid in sids]
    assert texts == ["abcX", "abcX", "defg hiX", "defg hiX"]


@pytest.mark.parametrize("group", [1, 2, 3, 100])
@pytest.mark.parametrize("logprobs", [-1, 2])
def test_29_a_stop_string_ends_a_sequence(place: World, group: int, logprobs: int) -> None:
    sampling = Sampling(stop=["own fox"], logprobs=logprobs)
    generate = place.ask(sampling=sampling)
    place.submits()
    place.accept(generate.rid)
    script = ids_of(FOX * 3)
    for offset in range(0, len(script), group):
        ids = script[offset : offset + group]
        records = [TokenLogprobs(-0.5, [number, 50], [-0.5, -2.0]) for number in ids]
        place.step(
            generate.rid,
            offset,
            ids,
            logprobs=SequenceLogprobs(generate.rid, offset, records) if logprobs > 0 else None,
        )
        place.turn()
    assert [abort.sids for abort in place.at(place.at_router, Abort)] == [[generate.rid]]
    assert place.at(place.at_router, Abort)[0].reason == "stop"
    place.step(generate.rid, len(script), [], "abort")
    deltas = place.until_end(generate.rid)
    assert "".join(delta.text for delta in deltas) == "The quick br"
    completing = next(count for count in range(99) if "own fox" in REFERENCE.decode(script[:count]))
    last = deltas[-1]
    assert (last.finish_reason, last.tokens) == ("stop", completing)
    assert last.usage is not None and last.usage.cached_tokens == 128
    entries = [entry for delta in deltas if delta.logprobs for entry in json.loads(delta.logprobs)]
    assert len(entries) == (completing if logprobs > 0 else 0)
    for entry, number in zip(entries, script, strict=False):
        assert bytes(entry["bytes"]).decode() == entry["token"] == REFERENCE.decode([number])
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -2.0]


def test_29_the_end_does_not_wait_for_ever_for_the_usage(place: World) -> None:
    generate = place.ask(sampling=Sampling(stop=["fox"]))
    ((_, ids, _),) = place.submits()
    place.accept(generate.rid)
    place.step(generate.rid, 0, ids_of(FOX))
    last = place.until_end(generate.rid)[-1]
    assert last.finish_reason == "stop" and last.usage is not None
    assert last.usage.prompt_tokens == len(ids)


def test_completions_logprobs_have_the_offsets_of_their_tokens(place: World) -> None:
    generate = place.ask(route="completions", prompts=["abc"], sampling=Sampling(logprobs=1))
    place.submits()
    place.accept(generate.rid)
    script = ids_of("né \U00012000!")
    for offset in range(0, len(script), 3):
        ids = script[offset : offset + 3]
        records = [TokenLogprobs(float("-inf"), [number], [-1.0]) for number in ids]
        place.step(generate.rid, offset, ids, logprobs=SequenceLogprobs(generate.rid, offset, records))
    place.step(generate.rid, len(script), [], "length")
    entries = [
        entry for delta in place.until_end(generate.rid) if delta.logprobs for entry in json.loads(delta.logprobs)
    ]
    assert len(entries) == len(script)
    for index, entry in enumerate(entries):
        whole = REFERENCE.decode(script[:index])
        assert entry["text_offset"] == len(whole.rstrip("\ufffd")), (index, whole)
        assert entry["token_logprob"] == -9999.0
        assert set(entry["top_logprobs"].values()) == {-1.0}


def test_27_a_character_cut_off_at_the_end_is_left_out(place: World) -> None:
    for reason in ("length", "stop"):
        generate = place.ask(sampling=Sampling())
        place.accept(generate.rid)
        script = ids_of("ok \U00012000")[:-1]
        place.until_begun(generate)
        place.step(generate.rid, 0, script, reason)
        last = place.until_end(generate.rid)[-1]
        assert (last.text, last.finish_reason, last.tokens) == ("ok ", reason, len(script))


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_27_a_stop_id_counts_and_its_text_is_not_shown(place: World, stop: list[str]) -> None:
    (number,) = ids_of("Q")
    generate = place.ask(sampling=Sampling(stop_token_ids=[number], stop=stop))
    place.until_begun(generate)
    place.accept(generate.rid)
    script = [*ids_of("ok z"), number]
    place.step(generate.rid, 0, script, "stop", stop_id=number)
    deltas = place.until_end(generate.rid)
    assert "".join(delta.text for delta in deltas) == "ok z"
    assert (deltas[-1].finish_reason, deltas[-1].tokens) == ("stop", len(script))


def test_tokens_without_text_under_ignore_eos_show_one_replacement(place: World) -> None:
    for ignore, text in ((True, "\ufffd"), (False, "")):
        generate = place.ask(sampling=Sampling(ignore_eos=ignore))
        place.submits()
        place.until_begun(generate)
        place.accept(generate.rid)
        place.step(generate.rid, 0, ids_of("\U00012000")[:2], "length")
        assert "".join(delta.text for delta in place.until_end(generate.rid)) == text


def test_a_failure_is_an_error_before_and_after_acceptance(place: World) -> None:
    for code, status in (("internal_error", 500), ("engine_unavailable", 503)):
        place.at_frontend.clear()
        generate = place.ask()
        place.until_begun(generate)
        place.step(generate.rid, 0, [], "error", code=code)
        (refusal,) = place.at(place.at_frontend, Rejected)
        assert (refusal.rid, refusal.status, refusal.code) == (generate.rid, status, code)
        generate = place.ask()
        place.until_begun(generate)
        place.accept(generate.rid)
        place.step(generate.rid, 0, ids_of("some"), "error", code=code)
        last = place.until_end(generate.rid)[-1]
        assert (last.error, last.finish_reason, last.usage) == (code, "", None)


def test_missing_ids_end_a_sequence_and_repeated_ones_are_skipped(place: World) -> None:
    generate = place.ask()
    place.submits()
    place.accept(generate.rid)
    script = ids_of("one two three")
    place.step(generate.rid, 0, script[:3])
    place.step(generate.rid, 1, script[1:4])
    place.turn_until(lambda: place.deltas(generate.rid), "text")
    assert "".join(delta.text for delta in place.deltas(generate.rid)) == REFERENCE.decode(script[:4])
    place.step(generate.rid, 5, script[5:])
    assert place.until_end(generate.rid)[-1].error == "internal_error"
    assert place.at(place.at_router, Abort)[-1].sids == [generate.rid]


def test_an_abort_goes_on_and_leaves_nothing(place: World) -> None:
    generate = place.ask(n=2)
    place.submits()
    assert place.frontend.send(Abort([generate.rid | choice for choice in range(256)], "client"))
    (abort,) = place.at(place.at_router, Abort)
    assert (abort.sids, abort.reason) == ([generate.rid, generate.rid | 1], "client")
    place.step(generate.rid, 0, ids_of("late"))
    place.turn()
    assert place.frontend.send(Abort([generate.rid], "client"))  # unknown by now: no error
    place.turn_until(lambda: not place.tokenizer.service.table.requests, "release")
    assert not place.deltas(generate.rid)


def test_an_abort_while_a_worker_encodes_sends_nothing_on(place: World) -> None:
    generate = place.ask(messages=[{"role": "user", "content": "word " * 3500}])
    assert place.frontend.send(Abort([generate.rid], "client"))
    place.turn_until(lambda: generate.rid not in place.tokenizer.service.table.requests, "release")
    other = place.ask(messages=[{"role": "user", "content": "word " * 3000}])
    ((submit, _, _),) = place.submits()
    assert submit.sid == other.rid
    place.tokenizer.service.lose_router()


def test_a_deadline_that_passes_while_a_worker_encodes(place: World) -> None:
    place.ask(messages=[{"role": "user", "content": "word " * 3500}], timeout=1e-6)
    (refusal,) = place.at(place.at_frontend, Rejected)
    assert (refusal.status, refusal.code) == (504, "request_timeout")
    assert not place.tokenizer.service.table.requests


def test_a_lost_router_ends_everything(place: World) -> None:
    waiting, running = place.ask(), place.ask()
    place.submits(2)
    place.accept(running.rid)
    place.at(place.at_frontend, Accepted)
    place.tokenizer.lost(Control("lost", role="router", index=0, generation=7))
    assert place.until_end(running.rid)[-1].error == "engine_unavailable"
    (refusal,) = place.at(place.at_frontend, Rejected)
    assert (refusal.rid, refusal.status) == (waiting.rid, 503)


def test_a_lost_frontend_s_requests_are_aborted(place: World) -> None:
    by_control = place.ask()
    place.submits()
    place.tokenizer.lost(Control("lost", role="frontend", index=0, generation=5))
    assert place.at(place.at_router, Abort)[0].sids == [by_control.rid]
    place.frontend.close()
    place.frontend = place.dial_frontend(6)
    place.turn_until(lambda: place.frontend.ready, "frontend")
    by_restart = place.ask()
    place.submits(2)
    place.frontend.close()
    place.frontend = place.dial_frontend(9)
    assert place.at(place.at_router, Abort, 2)[1].sids == [by_restart.rid]


def test_a_rejected_request_ends_with_the_router_s_words(place: World) -> None:
    generate = place.ask(n=3)
    place.submits()
    place.send(Rejected(generate.rid | 1, 429, "rate_limit_error", "queue_full", None, "the queue is full", 7))
    (refusal,) = place.at(place.at_frontend, Rejected)
    assert (refusal.rid, refusal.status, refusal.retry_after) == (generate.rid, 429, 7)
    assert set(place.at(place.at_router, Abort)[0].sids) == {generate.rid | choice for choice in range(3)}


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=8192), Sampling(max_tokens=2**31 - 1)])
def test_10_prompt_and_max_tokens_beyond_the_context(place: World, sampling: Sampling) -> None:
    for fields, param, size in (
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", 13),
        ({"route": "completions", "prompts": [[5] * 77]}, "prompt", 77),
    ):
        place.at_frontend.clear()
        place.ask(sampling=sampling, **fields)
        (refusal,) = place.at(place.at_frontend, Rejected)
        assert (refusal.status, refusal.code, refusal.param) == (400, "context_length_exceeded", param)
        assert "maximum context length is 8192 tokens" in refusal.text
        assert f" {size} " in refusal.text


@pytest.mark.parametrize("prompt", [[5] * 8192, [5] * 8193, "hello " * 9000, "x" * (8192 * 16 + 1)])
def test_10_33_a_prompt_beyond_the_context(place: World, prompt: str | list[int]) -> None:
    place.ask(route="completions", prompts=[prompt])
    (refusal,) = place.at(place.at_frontend, Rejected)
    assert (refusal.status, refusal.code, refusal.param) == (400, "context_length_exceeded", "prompt")
    assert "maximum context length is 8192 tokens" in refusal.text
    assert not place.tokenizer.service.table.requests


def test_87_without_max_tokens_the_request_runs_to_the_end_of_the_context(tmp_path: Path) -> None:
    for default, expected in ((0, 8191), (100, 100), (9000, 8191)):
        folder = tmp_path / str(default)
        folder.mkdir()
        with world(folder, default_max_tokens=default) as found:
            found.publish()
            found.ask(route="completions", prompts=[[5]])
            ((submit, _, _),) = found.submits()
            assert submit.params.max_tokens == expected
            found.tokenizer.service.lose_router()


@pytest.mark.parametrize(
    ("sampling", "prompts", "param"),
    [
        (Sampling(), [[VOCABULARY]], "prompt"),
        (Sampling(), [[-1]], "prompt"),
        (Sampling(), [[]], "prompt"),
        (Sampling(), [""], "prompt"),
        (Sampling(), ["a", [VOCABULARY]], "prompt"),
        (Sampling(stop_token_ids=[VOCABULARY]), ["a"], "stop_token_ids"),
        (Sampling(logit_bias={VOCABULARY: 1.0}), ["a"], "logit_bias"),
    ],
)
def test_47_48_ids_outside_the_vocabulary(
    place: World, sampling: Sampling, prompts: list[str | list[int]], param: str
) -> None:
    place.ask(n=len(prompts), route="completions", prompts=prompts, sampling=sampling)
    (refusal,) = place.at(place.at_frontend, Rejected)
    assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_value", param)


def test_47_the_last_id_is_accepted(place: World) -> None:
    generate = place.ask(route="completions", prompts=[[VOCABULARY - 1]], echo=True)
    ((_, ids, _),) = place.submits()
    assert ids == [VOCABULARY - 1]
    assert place.frontend.send(Abort([generate.rid], "client"))
    place.turn_until(lambda: not place.tokenizer.service.table.requests, "release")


def test_a_large_body_is_parsed_here(place: World) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 2000}], "n": 2, "max_tokens": 5}
    generate = Generate(place.ids.new(), "tenant", None, Sampling(), "chat")
    assert place.frontend.send(generate, msgspec.json.encode(body))
    ((submit, ids, _),) = place.submits()
    assert (submit.sid, submit.n, submit.tenant, submit.params.max_tokens) == (generate.rid, 2, "tenant", 5)
    assert len(ids) > 2000
    place.accept(generate.rid, generate.rid | 1)
    (accepted,) = place.at(place.at_frontend, Accepted)
    assert accepted.shape is not None and accepted.shape.n == 2
    assert place.frontend.send(Abort([generate.rid | choice for choice in range(256)], "client"))
    bad = Generate(place.ids.new(), "", None, Sampling(), "chat")
    assert place.frontend.send(bad, b'{"model": "tiny", "messages": []}')
    (refusal,) = place.at(place.at_frontend, Rejected)
    assert (refusal.rid, refusal.status, refusal.param) == (bad.rid, 400, "messages")
    place.turn_until(lambda: not place.tokenizer.service.table.requests, "release")


def test_28_nothing_of_one_answer_is_in_another(place: World) -> None:
    half = ids_of("\U00012000")[:2]
    for _ in range(2):
        generate = place.ask(sampling=Sampling(stop=["zzz"]))
        place.until_begun(generate)
        place.accept(generate.rid)
        place.step(generate.rid, 0, ids_of("zz") + half, "length")
        assert "".join(delta.text for delta in place.until_end(generate.rid)) == "zz"
