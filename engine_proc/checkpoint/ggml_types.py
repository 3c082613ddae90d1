"""The ggml block formats: sizes, and exact vectorised dequantisation to fp32.

A row of a quantised tensor is a run of blocks; a block is a few packed fields. The layouts are those of ggml's
`block_*` structures. Products of a scale and a quant fit fp32 exactly, so only the additions round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """block: elements in a block. size: bytes of a block. decode: uint8 [n, size] → fp32 [n, block]."""

    name: str
    block: int
    size: int
    decode: Callable[[Bytes], Floats]

    @property
    def quantised(self) -> bool:
        return self.block > 1


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 field at byte `at` of each block, as fp32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, k] → [n, 2k]: all low halves, then all high halves."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits at byte `at`, least significant first, each moved to bit 4: [n, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") * np.uint8(16)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * quants.astype(np.float32) + _half(blocks, 2)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes → 8 scales and 8 minima of 6 bits each, both [n, 8, 1].

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, each in the low 6 bits; bytes 8-11 hold the low 4 bits of scales
    4-7 and, in the high half, of minima 4-7, whose upper 2 bits are the spare bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (third & 0x0F) | ((first >> 6) << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    return scales[:, :, None].astype(np.float32), minima[:, :, None].astype(np.float32)


def _groups_of_64(packed: Bytes) -> Bytes:
    """[n, 128] → [n, 8, 32]: of each 32 bytes, first the low halves, then the high ones."""
    quads = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((quads & 0x0F, quads >> 4), axis=2).reshape(-1, 8, 32)


def _k_linear(blocks: Bytes, quants: Bytes) -> Floats:
    scales, minima = _k_scales(blocks[:, 4:16])
    slope = _half(blocks, 0)[:, :, None] * scales
    offset = _half(blocks, 2)[:, :, None] * minima
    return (slope * quants.astype(np.float32) - offset).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _k_linear(blocks, _groups_of_64(blocks[:, 16:144]))


def _q5_k(blocks: Bytes) -> Floats:
    # Bit j of high byte l is the fifth bit of element l of group j.
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high: Bytes = ((blocks[:, None, 16:48] >> shifts) & np.uint8(1)) * np.uint8(16)
    return _k_linear(blocks, _groups_of_64(blocks[:, 48:176]) | high)


def _q6_k(blocks: Bytes) -> Floats:
    # Two halves of 128 elements; in each, 64 low bytes give four runs of 32, 32 high bytes two more bits for each run.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 0x0F, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)
    return (scales[:, :, None] * quants.reshape(-1, 16, 16)).reshape(-1, 256)


# By ggml's type number.
FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}

# Names of the numbers above 30 and in between that exist and are not read, for the refusal.
OTHER_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def dequantise(data: Bytes, form: BlockFormat) -> Floats:
    """uint8 [whole blocks], contiguous → fp32 [elements], a view where the format is fp32."""
    return form.decode(data.reshape(-1, form.size)).reshape(-1)
