"""The law: each ggml block format is decoded to exactly the fp32 values that its definition gives, for any bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from engine_proc.checkpoint.ggml_types import FORMATS, dequantise

# The references below go element by element, as the formats are defined, in float32.
Block = bytes
f32 = np.float32


def half(block: Block, at: int) -> np.float32:
    return f32(struct.unpack_from("<e", block, at)[0])


def q8_0(block: Block) -> list[np.float32]:
    return [half(block, 0) * f32(struct.unpack_from("<b", block, 2 + j)[0]) for j in range(32)]


def nibble(block: Block, start: int, j: int) -> int:
    """Element j of 32: the low half of byte j, then the high half of byte j - 16."""
    return block[start + j] & 15 if j < 16 else block[start + j - 16] >> 4


def q4_0(block: Block) -> list[np.float32]:
    return [half(block, 0) * f32(nibble(block, 2, j) - 8) for j in range(32)]


def q4_1(block: Block) -> list[np.float32]:
    return [half(block, 0) * f32(nibble(block, 4, j)) + half(block, 2) for j in range(32)]


def fifth(block: Block, at: int, j: int) -> int:
    return (int.from_bytes(block[at : at + 4], "little") >> j & 1) * 16


def q5_0(block: Block) -> list[np.float32]:
    return [half(block, 0) * f32((nibble(block, 6, j) | fifth(block, 2, j)) - 16) for j in range(32)]


def q5_1(block: Block) -> list[np.float32]:
    return [half(block, 0) * f32(nibble(block, 8, j) | fifth(block, 4, j)) + half(block, 2) for j in range(32)]


def scale_and_minimum(block: Block, j: int) -> tuple[int, int]:
    packed = block[4:16]
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def k_linear(block: Block, quant: Callable[[int, int], int]) -> list[np.float32]:
    found = []
    for group in range(8):
        scale, minimum = scale_and_minimum(block, group)
        for j in range(32):
            slope, offset = half(block, 0) * f32(scale), half(block, 2) * f32(minimum)
            found.append(slope * f32(quant(group, j)) - offset)
    return found


def q4_k(block: Block) -> list[np.float32]:
    return k_linear(block, lambda group, j: block[16 + group // 2 * 32 + j] >> 4 * (group % 2) & 15)


def q5_k(block: Block) -> list[np.float32]:
    def quant(group: int, j: int) -> int:
        low = block[48 + group // 2 * 32 + j] >> 4 * (group % 2) & 15
        return low | (block[16 + j] >> group & 1) << 4

    return k_linear(block, quant)


def q6_k(block: Block) -> list[np.float32]:
    found = []
    for element in range(256):
        part, run, j = element // 128, element % 128 // 32, element % 32
        low = block[part * 64 + run % 2 * 32 + j] >> 4 * (run // 2) & 15
        high = block[128 + part * 32 + j] >> 2 * run & 3
        scale = struct.unpack_from("<b", block, 192 + element // 16)[0]
        found.append(half(block, 208) * f32(scale) * f32((low | high << 4) - 32))
    return found


def f16(block: Block) -> list[np.float32]:
    return [half(block, 0)]


def plain(block: Block) -> list[np.float32]:
    return [f32(struct.unpack("<f", block)[0])]


def bf16(block: Block) -> list[np.float32]:
    return [f32(struct.unpack("<f", b"\0\0" + block)[0])]


REFERENCES = {
    "F32": plain, "F16": f16, "BF16": bf16, "Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1,
    "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
BY_NAME = {form.name: form for form in FORMATS.values()}
# Where the fp16 fields lie: the tests keep them finite, as every file does.
HALVES: dict[str, tuple[int, ...]] = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q6_K": (208,), "F16": (0,)}
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))


def test_every_accepted_format_has_a_reference() -> None:
    assert set(BY_NAME) == set(REFERENCES)


@pytest.mark.parametrize("name", REFERENCES)
@given(seed=some.integers(0, 2**32 - 1), count=some.integers(1, 4))
def test_any_blocks_decode_to_the_definition(name: str, seed: int, count: int) -> None:
    form = BY_NAME[name]
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (count, form.size), dtype=np.uint8)
    for at in HALVES.get(name, ()):
        scales = (draw.standard_normal(count) * 10.0 ** draw.integers(-6, 3, count)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    if name in ("F32", "BF16"):
        blocks[:, -1] &= 0xBE  # no infinity, no NaN
    expected = np.array([value for block in blocks for value in REFERENCES[name](block.tobytes())], dtype=np.float32)
    found = dequantise(blocks.reshape(-1), form)
    assert found.dtype == np.float32
    assert found.shape == (count * form.block,)
    np.testing.assert_array_equal(found, expected)  # bit for bit, but 0 equals -0
