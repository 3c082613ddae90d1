"""The law: each kernel computes what its plain torch form computes, on any valid input, and writes nothing else."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

from engine_proc.models import rope
from engine_proc.models.base import AttentionShape
from engine_proc.models.ops import TorchOps
from engine_proc.models.rotary import Rotary

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="Triton is not installed")

# Triton's interpreter runs the same kernels on the CPU, for a look without a device.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < TOLERANCE[found.dtype], float(error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (7, 4096), (2, 5120)])
def test_add_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    from engine_proc.kernels import fused

    x, y, weight = (drawn(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    total = x.double() + y.double()
    norm = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    close(fused.add_rms_norm(x, y, weight, 1e-6), norm)
    close(x, total)
    before = x.clone()
    close(fused.add_rms_norm(x, None, weight, 1e-6), TorchOps().norm(x.double(), weight.double(), 1e-6))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (32, 8, 128), (5, 1, 80), (2, 2, 16)])
def test_heads_are_prepared_and_stored(dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, size: int) -> None:
    """Values stay as they were; nothing but the places of these tokens is written; a filler is not stored."""
    from engine_proc.kernels import store

    block_tokens, num_blocks, both = 16, 40, heads + kv_heads
    slots = torch.tensor([0, 2, 1, 2, 3], device=DEVICE)
    positions = torch.tensor([0, 1, 77, 15, -1], device=DEVICE)
    tables = (
        torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).to(torch.int32).view(4, 10).to(DEVICE)
    )
    cache = drawn(2, num_blocks, block_tokens, kv_heads, size, dtype=dtype)
    qkv = drawn(len(slots), both + kv_heads, size, dtype=dtype)
    frequencies = rope.inverse_frequencies(size, 10_000.0, None).to(DEVICE)
    cos, sin = rope.rotation(torch.tensor([0, 1, 77, 4095, 100_000], device=DEVICE), frequencies, dtype)
    weights = (drawn(size, dtype=dtype), drawn(size, dtype=dtype)) if normed else None
    wide = None if weights is None else (weights[0].double(), weights[1].double())
    q, k, v = Rotary(cos.double(), sin.double(), wide, 1e-6).apply(qkv.double(), heads, kv_heads)
    values, wanted = v.to(dtype), cache.clone()
    shape = AttentionShape(1, heads, kv_heads, size, 1.0, block_tokens)
    store.prepare(qkv, Rotary(cos, sin, weights, 1e-6), shape, cache, tables, slots, positions)
    close(qkv[:, :heads], q)
    close(qkv[:, heads:both], k)
    assert torch.equal(qkv[:, both:], values)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if position >= 0:
            block = int(tables[slot, position // block_tokens])
            wanted[0, block, position % block_tokens] = qkv[row, heads:both]
            wanted[1, block, position % block_tokens] = values[row]
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (3, 1536), (2, 12288)])
def test_silu_mul(dtype: torch.dtype, rows: int, width: int) -> None:
    from engine_proc.kernels import fused

    gate_up = drawn(rows, 2 * width, dtype=dtype)
    close(fused.silu_mul(gate_up), TorchOps().silu_mul(gate_up.double()))


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter has no bf16 products")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("width", "outputs"), [(576, 960), (1536, 576), (4096, 6144), (80, 49152), (12288, 100)])
def test_products_of_few_rows(biased: bool, width: int, outputs: int) -> None:
    from engine_proc.kernels import small_batch

    weight = drawn(outputs, width, dtype=torch.bfloat16)
    bias = drawn(outputs, dtype=torch.bfloat16) if biased else None
    for rows in (1, 2, 7, 16, 17, 32):
        x = drawn(rows, width, dtype=torch.bfloat16)
        wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        close(small_batch.linear(x, weight, bias), wanted)
        close(small_batch.linear(x, weight, bias, torch.empty(rows, outputs, device=DEVICE)), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 8, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_tokens"),
    [(9, 3, 64, 16), (32, 8, 128, 128), (6, 6, 80, 128), (24, 1, 128, 16)],
)
def test_attend_over_scattered_blocks(
    dtype: torch.dtype, splits: int, heads: int, kv_heads: int, size: int, block_tokens: int
) -> None:
    """Rows of several lengths, one that only fills the batch."""
    from engine_proc.kernels import paged_attention

    generator = np.random.default_rng(4)
    lengths = [1, 2, block_tokens, block_tokens + 1, 700, 0]
    num_blocks, width, spare = 256, 64, 7
    shape = AttentionShape(1, heads, kv_heads, size, 1 / math.sqrt(size), block_tokens)
    cache = drawn(2, num_blocks, block_tokens, kv_heads, size, dtype=dtype)
    order = generator.permutation(num_blocks - spare) + spare
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, length in enumerate(lengths):
        count = -(-length // block_tokens)
        tables[row, :count] = torch.from_numpy(order[row * 45 : row * 45 + count])
    tables = tables.to(DEVICE)
    slots = torch.tensor([4, 2, 0, 1, 3, 5], device=DEVICE)
    positions = torch.tensor([lengths[slot] - 1 for slot in slots.tolist()], device=DEVICE)
    q = drawn(len(lengths), heads + 2 * kv_heads, size, dtype=dtype)[:, :heads]
    found = paged_attention.attend(q, cache, tables, slots, positions, shape, splits).view(len(lengths), heads, size)
    assert found.isfinite().all()
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if position < 0:
            continue
        blocks = tables[slot, : position // block_tokens + 1].long()
        keys, values = (part[blocks].reshape(-1, kv_heads, size)[: position + 1].double() for part in cache)
        keys, values = (part.repeat_interleave(heads // kv_heads, 1) for part in (keys, values))
        scores = torch.einsum("hd,shd->hs", q[row].double(), keys) * shape.scale
        close(found[row], torch.einsum("hs,shd->hd", scores.softmax(-1), values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (32, 8, 128), (4, 4, 80)])
def test_tiles_of_several_sequences(dtype: torch.dtype, splits: int, heads: int, kv_heads: int, size: int) -> None:
    """Runs of tokens in mid-context, at its start, and single ones, in one batch with fillers."""
    from engine_proc.kernels import paged_attention

    block_tokens, num_blocks = 16, 64
    shape = AttentionShape(1, heads, kv_heads, size, 1 / math.sqrt(size), block_tokens)
    cache = drawn(2, num_blocks, block_tokens, kv_heads, size, dtype=dtype)
    tables = (
        torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).to(torch.int32).view(4, 16).to(DEVICE)
    )
    runs = [(2, 100, 1), (0, 0, 37), (3, 90, 70), (1, 255, 1)]  # slot, first position, tokens
    tokens = [(slot, first + index) for slot, first, count in runs for index in range(count)]
    in_tile = paged_attention.tile_tokens(shape)
    tiles, at = [], 0
    for _, _, count in runs:
        tiles += [(at + index, min(in_tile, count - index)) for index in range(0, count, in_tile)]
        at += count
    tiles += [(0, 0)] * 5
    tokens += [(0, -1)] * 3
    slots, positions = (torch.tensor(part, device=DEVICE) for part in zip(*tokens, strict=True))
    q = drawn(len(tokens), heads + 2 * kv_heads, size, dtype=dtype)[:, :heads]
    packed = torch.tensor(tiles, device=DEVICE).T.contiguous()
    found = paged_attention.attend(q, cache, tables, slots, positions, shape, splits, packed)
    assert found.isfinite().all()
    for row, (slot, position) in enumerate(tokens[:-3]):
        blocks = tables[slot].long()
        keys, values = (part[blocks].reshape(-1, kv_heads, size)[: position + 1].double() for part in cache)
        keys, values = (part.repeat_interleave(heads // kv_heads, 1) for part in (keys, values))
        scores = torch.einsum("hd,shd->hs", q[row].double(), keys) * shape.scale
        close(found[row].view(heads, size), torch.einsum("hs,shd->hd", scores.softmax(-1), values))
