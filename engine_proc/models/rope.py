"""Rotary position embedding: frequencies for the accepted scaling types, and the rotation itself."""

from __future__ import annotations

import math
from typing import Any

import torch

ROPE_TYPES = ("default", "linear", "llama3")


def rope_type(scaling: dict[str, Any] | None) -> str:
    """The type named by a config's rope_scaling / rope_parameters (None = "default")."""
    if not scaling:
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> torch.Tensor:
    """fp32 [head_dim / 2], on the CPU. ValueError for a type that is not served, KeyError never."""
    kind = rope_type(scaling)
    base = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind == "default" or scaling is None:
        return base
    if kind == "linear":
        return base / _number(scaling, "factor")
    if kind == "llama3":
        return _llama3(base, scaling)
    raise ValueError(f"rope_scaling type {kind!r} is not served; accepted are {', '.join(ROPE_TYPES)}")


def _number(scaling: dict[str, Any], name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"rope_scaling.{name} must be a number above 0, not {value!r}")
    return float(value)


def _llama3(base: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones stay, a smooth passage lies between."""
    factor = _number(scaling, "factor")
    low = _number(scaling, "low_freq_factor")
    high = _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings")
    if high <= low:
        raise ValueError(f"rope_scaling.high_freq_factor {high} must be above low_freq_factor {low}")
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * base / factor + smooth * base
    scaled = torch.where(wavelength > original / low, base / factor, base)
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, between, scaled)


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [T] and fp32 [D/2] → cos [T, 1, D] (both halves) and sin [T, 1, D/2], computed in fp32."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos = angles.cos().to(dtype)
    return torch.cat((cos, cos), dim=-1)[:, None], angles.sin().to(dtype)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] in the half-split order (channel i pairs with i + D/2) → the rotated tensor, in new memory."""
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1.0)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out
