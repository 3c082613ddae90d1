"""The law (behaviour 65): block keys depend on nothing but secret, model, format, tenant and ids, in any process."""

from __future__ import annotations

import hashlib
import hmac
import os
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.keys import KEY_BYTES, block_keys, root_key

SECRET = bytes(range(32))
IDS = array("i", [7 * number % 49_152 for number in range(300)]).tobytes()


def vectors() -> list[str]:
    """Root and keys that stand in VECTORS."""
    root = root_key(SECRET, "ab" * 32, "fp32/llama/128", "tenant-1")
    return [
        root.hex(),
        root_key(SECRET, "ab" * 32, "fp32/llama/128", "").hex(),
        *[key.hex() for key in block_keys(root, IDS, 128)],
        block_keys(root, IDS, 16)[-1].hex(),
        block_keys(root, IDS, 128, key_bits=8)[-1].hex(),
    ]


VECTORS = [
    "b1fe2c4780e309b836761ec6817ad2ba8cfece58d9e294d1dfd9c7d9bc83289d",
    "7d586b426cf522fccecbd01b3f76f0b8fe3a85057b2548e8b0dfc3cdce78a62b",
    "60dd476d75b40397b0a588727f1c6d1e814b60f6e05d5cb07605b370a8ccd190",
    "203dce86a81342f05aec601c936b45f2fb5305d683f434a396bbc5719e066508",
    "a2baf2b0a03cebd28634569b4b69f970489eb0417b09107f1823c5829fb5d56e",
    "e400000000000000000000000000000000000000000000000000000000000000",
]
PROGRAM = "from tests.unit.test_wire_keys import vectors; print(*vectors())"


@pytest.mark.parametrize("seed", ["1", "2", "random"])
def test_65_keys_are_the_stored_ones_in_every_process(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == VECTORS == vectors()


def test_65_the_definition_written_out() -> None:
    fields = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (b"ab" * 32, b"fp32/llama/128", b"tenant-1"))
    root = hmac.new(SECRET, fields, "sha256").digest()
    first = hashlib.sha256(root + IDS[:512]).digest()
    assert VECTORS[0] == root.hex()
    assert VECTORS[2] == first.hex()
    assert VECTORS[3] == hashlib.sha256(first + IDS[512:1024]).hexdigest()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.integers(0, 70))
def test_a_chain_goes_on_from_any_block(ids: list[int], cut: int) -> None:
    raw = array("i", ids).tobytes()
    keys = block_keys(SECRET, raw, 8)
    assert len(keys) == len(ids) // 8
    assert all(len(key) == KEY_BYTES for key in keys)
    done = min(cut, len(keys))
    parent = keys[done - 1] if done else SECRET
    assert keys[:done] + block_keys(parent, memoryview(raw)[done * 32 :], 8) == keys


def test_no_two_roots_are_the_same() -> None:
    """Another secret, model, format or tenant, and fields that only join to the same bytes."""
    roots = [
        root_key(SECRET, "ab", "c", "d"),
        root_key(SECRET[::-1], "ab", "c", "d"),
        root_key(SECRET, "ab", "c", "e"),
        root_key(SECRET, "ab", "", "cd"),
        root_key(SECRET, "a", "bc", "d"),
        root_key(SECRET, "abcd", "", ""),
        root_key(SECRET, "", "abcd", ""),
    ]
    assert len(set(roots)) == len(roots)


def test_one_id_changes_its_key_and_all_after_it() -> None:
    keys = block_keys(SECRET, IDS, 16)
    for block in (0, 7, len(keys) - 1):
        changed = bytearray(IDS)
        changed[64 * block] ^= 1
        others = block_keys(SECRET, bytes(changed), 16)
        assert [a == b for a, b in zip(keys, others, strict=True)] == [i < block for i in range(len(keys))]


def test_fewer_key_bits_make_collisions() -> None:
    ids = array("i", range(16 * 600)).tobytes()
    keys = block_keys(SECRET, ids, 16, key_bits=8)
    assert len(set(keys)) <= 256
    assert all(not any(key[1:]) for key in keys)
