"""Counter-based random numbers: what is drawn depends on (seed, choice, position, token id) and on nothing else.

Integer tensor arithmetic that wraps, so the bits are the same on every device. A row's key is mixed in 64 bits
(the finalizer of splitmix64); per token a 32-bit hash (the multiply-xorshift form of Ettinger's `lowbias32`) takes
one half of the key before its first round and the other half between its rounds.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_TOKEN_STEP = 0x9E3779B1
_LARGEST = 1.0 - 2.0**-24  # the largest fp32 below 1


def _signed(value: int, bits: int) -> int:
    """The same bits as a signed integer, as torch takes its scalars."""
    return value - (1 << bits) if value >> (bits - 1) else value


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def row_keys(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """int64 [R] each → int64 [R]."""
    golden = _signed(_GOLDEN, 64)
    sequence = _mix64(_mix64(seed + golden) + (choice + 1) * golden)
    return _mix64(sequence + (position + 1) * golden)


def token_terms(vocab_size: int, device: torch.device) -> torch.Tensor:
    """int32 [V]: the part of the hash that depends on the token id only."""
    return torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(_TOKEN_STEP, 32)


def _fold(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^ (x >>> bits), in place; torch's >> keeps the sign, so the shifted-in ones are cleared."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def random_bits(keys: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """int64 [R] and int32 [V] → int32 [R, V], all 32 bits uniform."""
    low, high = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    x = _fold(terms + low, 16).mul_(0x21F0AAAD)
    x = _fold(x.add_(high), 15).mul_(0x735A2D97)
    return _fold(x, 15)


def gumbel(keys: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, fp32 [R, V]: argmax(log p + noise) is a draw from p.

    -log(E) with E = -log(1 - u), u in (0, 1): small u keep all 31 bits, so the large noise that decides is fine.
    """
    u = random_bits(keys, terms).bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return u.clamp_(max=_LARGEST).neg_().log1p_().neg_().log_().neg_()
