"""The law: the bytes of every message stay what they are; a change of format is never made by accident."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.wire_samples import GOLDEN, RID, golden, samples
from wire import messages
from wire.messages import CHOICE_MASK, MESSAGES, Message, RequestIds, choice_of, decoder, encoder, rid_of

STORED: dict[str, str] = json.loads(GOLDEN.read_text())


def test_every_message_has_golden_bytes() -> None:
    assert {kind.__name__ for kind in get_args(MESSAGES)} == {type(sample).__name__ for sample in samples()}
    defined = {item for item in vars(messages).values() if isinstance(item, type) and issubclass(item, Message)} - {
        Message
    }
    assert defined == set(get_args(MESSAGES))
    assert STORED.keys() == golden().keys()


@pytest.mark.parametrize("name", STORED)
def test_bytes_are_the_stored_ones(name: str) -> None:
    assert golden()[name] == STORED[name]


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: type(sample).__name__)
def test_stored_bytes_give_the_message(sample: Message) -> None:
    assert decoder.decode(bytes.fromhex(STORED[type(sample).__name__])) == sample


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: type(sample).__name__)
def test_samples_leave_no_field_at_its_default(sample: Message) -> None:
    def look(item: Any) -> None:
        for field in msgspec.structs.fields(item):
            value = getattr(item, field.name)
            default = field.default_factory() if callable(field.default_factory) else field.default
            assert value != default, f"{type(item).__name__}.{field.name}"
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, msgspec.Struct):
                    look(part)

    look(sample)


@given(st.data())
def test_no_bytes_do_more_than_fail_to_decode(data: st.DataObject) -> None:
    """Random bytes, and valid messages cut or changed at any place."""
    raw = data.draw(st.binary(max_size=64) | st.sampled_from([bytes.fromhex(text) for text in STORED.values()]))
    if raw:
        at = data.draw(st.integers(0, len(raw) - 1))
        raw = data.draw(st.sampled_from([raw[:at], raw[:at] + b"\xff" + raw[at + 1 :], raw + raw[:at]]))
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        assert isinstance(decoder.decode(raw), Message)


class Trap:
    """Its unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (Path.touch, (self.path,))  # type: ignore[return-value]


def test_84_a_pickle_in_any_field_stays_bytes(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    trap = pickle.dumps(Trap(canary))
    pickle.loads(trap)  # noqa: S301 - made two lines above
    assert canary.exists(), "the trap works"
    canary.unlink()
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        decoder.decode(trap)
    tried = 0
    for sample in samples():
        for field in msgspec.structs.fields(type(sample)):
            if field.type is bytes:
                changed = msgspec.structs.replace(sample, **{field.name: trap})
                assert decoder.decode(encoder.encode(changed)) == changed
                tried += 1
    assert tried >= 3
    assert not canary.exists()


def test_ids_of_requests_and_sequences() -> None:
    ids = RequestIds()
    made = [ids.new() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(0 < rid < 2**63 and rid & CHOICE_MASK == 0 for rid in made)
    assert rid_of(RID | 255) == RID
    assert choice_of(RID | 255) == 255
    assert RequestIds().new() != RequestIds().new()
