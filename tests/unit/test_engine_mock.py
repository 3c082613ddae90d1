"""The mock engine says what it is told to, by the rules of a real one, and needs no torch.

Its ids depend on the prompt and the position alone. EOS and stop ids, min_tokens, ignore_eos, max_tokens and logprobs
mean what they mean elsewhere.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_proc.mock_model import MockRunner, read_model
from engine_proc.plan import Row, SlotState, StepPlan
from tests.unit.engine_world import params, prompt_of
from tests.unit.loop_world import TINY, LoopWorld, loop_world, tiny_model

ROOT = Path(__file__).resolve().parents[2]
EOS = 2


@pytest.fixture(scope="module")
def world() -> Iterator[LoopWorld]:
    with tempfile.TemporaryDirectory(prefix="dis") as folder, loop_world(Path(folder)) as found:
        yield found


def test_it_imports_no_torch() -> None:
    program = "import sys, engine_proc.mock_main; sys.exit(any(name in sys.modules for name in ('torch', 'triton')))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_the_counter_says_plain_words_and_never_ends(world: LoopWorld) -> None:
    sid = world.submit(prompt_of(1, 30), params(3000))
    (end,) = world.ended(sid)
    assert (end.reason, end.completion_tokens) == ("length", 3000)
    assert set(world.ids[sid]) <= set(tiny_model().words.tolist())
    assert len(set(world.ids[sid])) > 100
    vocabulary = json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]
    text = {number: token for token, number in vocabulary.items()}
    assert all(text[token].lstrip("\u0120").isalpha() for token in world.ids[sid])


def test_the_words_go_round_through_all_of_them() -> None:
    words = tiny_model().words
    runner = MockRunner(tiny_model(), 1)
    runner.open_slot(0, state([5]))
    found = [int(runner.launch(step(at)).result().ids[0]) for at in range(len(words))]
    assert sorted(found) == words.tolist()


@pytest.mark.parametrize("width", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("max_tokens", [1, 4, 7, 8, 9])
def test_a_script_then_eos(world: LoopWorld, width: int, max_tokens: int) -> None:
    script = [100, 101, 102, 103, 104, 105, 106]
    sid = world.submit([5, 6], params(max_tokens, hooks={"script": script, "tokens_per_step": width}))
    (end,) = world.ended(sid)
    assert world.ids[sid] == [*script, EOS][:max_tokens]
    assert (end.reason, end.stop_id) == (("length", -1) if max_tokens < 8 else ("stop", EOS))
    assert end.completion_tokens == min(8, max_tokens)


@pytest.mark.parametrize("width", [1, 3, 64])
def test_a_stop_id_in_the_middle_of_a_step_ends_it(world: LoopWorld, width: int) -> None:
    script = [100, 101, 102, 103, 104]
    wish = params(50, stop_token_ids=[102], hooks={"script": script, "tokens_per_step": width})
    sid = world.submit([5, 6], wish)
    assert (world.ended(sid)[0].stop_id, world.ids[sid]) == (102, [100, 101, 102])


def test_several_ids_a_step_fill_blocks_like_single_ones(world: LoopWorld) -> None:
    prompt = prompt_of(77, 100)
    wide = world.submit(prompt, params(700, hooks={"tokens_per_step": 9}))
    world.ended(wide)
    narrow = world.submit(prompt, params(700, prefix_cache=False))
    world.ended(narrow)
    assert world.ids[wide] == world.ids[narrow]
    longer = world.submit(prompt + world.ids[wide] + [9], params(1))
    assert world.ended(longer)[0].usage.cached_tokens == 768, "blocks of prompt and produced ids are found"


def test_several_ids_a_step_come_in_one_message(world: LoopWorld) -> None:
    from wire.messages import StepOutput

    sid = world.submit([5, 6], params(40, hooks={"tokens_per_step": 8}))
    world.ended(sid)
    counts = [
        count for item in world.of(StepOutput) for at, count in zip(item.sids, item.counts, strict=True) if at == sid
    ]
    assert counts == [8] * 5


def test_echo_repeats_the_prompt(world: LoopWorld) -> None:
    prompt = prompt_of(3, 150)
    sid = world.submit(prompt, params(500, hooks={"echo": True}))
    (end,) = world.ended(sid)
    assert world.ids[sid] == [*prompt, EOS]
    assert end.reason == "stop"


def test_an_engine_can_be_all_echo() -> None:
    runner = MockRunner(tiny_model(), 1, "echo")
    runner.open_slot(0, state([5, 6, 7]))
    assert [int(runner.launch(step(at)).result().ids[0]) for at in range(2, 6)] == [5, 6, 7, EOS]
    with pytest.raises(ValueError, match="counter, echo"):
        MockRunner(tiny_model(), 1, "parrot")


@pytest.mark.parametrize(
    ("fields", "count", "reason"),
    [({"ignore_eos": True}, 12, "length"), ({"min_tokens": 8}, 9, "stop"), ({"min_tokens": 2}, 4, "stop")],
)
def test_eos_where_it_may_not_be(world: LoopWorld, fields: dict[str, object], count: int, reason: str) -> None:
    sid = world.submit([5, 6], params(12, hooks={"script": [100, 101, 102]}, **fields))
    (end,) = world.ended(sid)
    assert (end.completion_tokens, end.reason) == (count, reason)
    assert world.ids[sid][:3] == [100, 101, 102]
    assert EOS not in world.ids[sid][:-1]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("top", [0, 3])
def test_every_id_has_its_logprobs(world: LoopWorld, width: int, top: int) -> None:
    world.records.clear()
    sid = world.submit([5, 6], params(10, logprobs=top, hooks={"tokens_per_step": width}))
    world.ended(sid)
    found = {item.offset + at: record for item in world.records for at, record in enumerate(item.tokens)}
    assert sorted(found) == list(range(10))
    for at, record in found.items():
        assert record.logprob == pytest.approx(math.log(0.5))
        assert len(record.top_ids) == len(set(record.top_ids)) == len(record.top_logprobs) == top
        assert record.top_ids[:1] == world.ids[sid][at : at + 1][: min(1, top)]
        assert record.top_logprobs == sorted(record.top_logprobs, reverse=True)


def test_steps_take_the_time_they_are_given(world: LoopWorld) -> None:
    sid = world.submit([5, 6], params(10, hooks={"step_ms": 20}))
    began = time.monotonic()
    world.ended(sid)
    assert 0.18 <= time.monotonic() - began < 0.6


def test_a_slow_step_paces_all_steps_until_it_is_over(world: LoopWorld) -> None:
    runner = MockRunner(tiny_model(), 2, step_ms=1)
    runner.open_slot(0, state([5], hooks={"step_ms": 30}))
    began = time.monotonic()
    for _ in range(2):
        runner.launch(step(0)).result()
    runner.close_slot(0)
    runner.open_slot(1, state([5]))
    middle = time.monotonic()
    for _ in range(5):
        pending = runner.launch(StepPlan([Row(1, 0, 1, None, np.zeros(1, np.int32), True)], 1))
        assert not pending.done()
        pending.result()
    assert middle - began >= 0.055
    assert 0.004 <= time.monotonic() - middle < 0.05


@pytest.mark.parametrize(
    "hooks", [{"script": [2048]}, {"script": [-1]}, {"script": "ab"}, {"step_ms": -1}, {"tokens_per_step": 0.5}]
)
def test_hooks_that_make_no_sense_fail_their_sequence(world: LoopWorld, hooks: dict[str, object]) -> None:
    sid = world.submit([5, 6], params(4, hooks=hooks))
    assert world.ended(sid)[0].code == "internal_error"


def test_slots_are_open_once() -> None:
    runner = MockRunner(tiny_model(), 2)
    runner.open_slot(0, state([5]))
    with pytest.raises(RuntimeError, match="open already"):
        runner.open_slot(0, state([5]))
    runner.close_slot(0)
    with pytest.raises(RuntimeError, match="not open"):
        runner.close_slot(0)


def state(prompt: list[int], **changes: object) -> SlotState:
    return SlotState(params(64, **changes), 0, np.array(prompt, np.int32), np.empty(0, np.int32), [], [EOS], 0)


def step(at: int) -> StepPlan:
    """One decode row of slot 0."""
    return StepPlan([Row(0, at, 1, None, np.zeros(1, np.int32), True)], 1)


# --- the model folder -------------------------------------------------------------------------------------------------


def folder_with(folder: Path, tokenizer: str) -> Path:
    (folder / "config.json").write_text((TINY / "config.json").read_text())
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ({"model": {"vocab": {"a": 5, "\u0120bc": 6, "1": 7, "<x>": 8, "end": 2, "far": 5000}}}, [5, 6]),
        ({"model": {"vocab": [["<unk>", 0.0], ["\u2581the", -1.0], ["x", -2.0], ["say", -3.0]]}}, [1, 3]),
        ({"model": {"vocab": {"a": 5, "b": 6, "c": 7}}, "added_tokens": [{"id": 6, "content": "b"}]}, [5, 7]),
    ],
    ids=["bytes", "pieces", "added"],
)
def test_words_of_a_vocabulary(tmp_path: Path, tokenizer: dict[str, object], words: list[int]) -> None:
    assert read_model(folder_with(tmp_path, json.dumps(tokenizer)), 128).words.tolist() == words


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": {"1": 1}}}', "\x00"])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        read_model(folder_with(tmp_path, text), 128)


def test_other_configurations_have_other_digests(tmp_path: Path) -> None:
    path = folder_with(tmp_path, (TINY / "tokenizer.json").read_text()) / "config.json"
    assert read_model(tmp_path, 128).digest == tiny_model().digest
    path.write_text(path.read_text().replace("8192", "4096"))
    assert read_model(tmp_path, 128).digest != tiny_model().digest
