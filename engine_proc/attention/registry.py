"""Which attention backends exist, and which one a device gets."""

from __future__ import annotations

import importlib.util

import torch

from engine_proc.attention.base import AttentionBackend, Room
from engine_proc.attention.sdpa import SdpaBackend

BACKENDS = ("auto", "sdpa", "paged")


def make_backend(name: str, room: Room, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """ "auto" is "paged" on CUDA and "sdpa" elsewhere. ValueError names what is unknown, or not to be had here."""
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; accepted are {', '.join(BACKENDS)}")
    if name == "auto":
        name = "paged" if device.type == "cuda" else "sdpa"
    if name == "sdpa":
        return SdpaBackend(room, device, dtype)
    if device.type != "cuda":
        raise ValueError(f"attention backend 'paged' needs a CUDA device, not {device.type}; accepted here is sdpa")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("attention backend 'paged' needs Triton, which is not installed; accepted here is sdpa")
    from engine_proc.attention.paged import PagedBackend  # noqa: PLC0415  imports Triton

    return PagedBackend(room, device, dtype)
