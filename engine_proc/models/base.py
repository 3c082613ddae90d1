"""What the loader and the runner may know of a model: one interface for all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from engine_proc.cache_spec import CacheSpec
from engine_proc.models.rotary import Rotary

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of all attention layers of a model that keeps K and V per token."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    block_tokens: int


class ModelConfig(Protocol):
    """The parts of a family's configuration that others read."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def attention(self) -> AttentionShape: ...

    def numbers(self) -> dict[str, Any]:
        """Every field that changes the numbers a model computes: they go into its content digest."""
        ...


class LayerAttention(Protocol):
    """Attention of one step, as a model calls it: once per layer, in any order of layers."""

    def attend(self, layer: int, qkv: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Prepares the heads, stores K and V of the step's tokens in the cache; → what the tokens attend to.

        qkv [T, heads + 2 * kv_heads, head_dim], contiguous, whose memory may be used → [T, heads * head_dim].
        """
        ...


class Model(Protocol):
    """Weights and forward pass. Nothing here waits for the device."""

    @property
    def cache_spec(self) -> CacheSpec: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name → the view of this model's memory that it fills; all are needed. Until `finish`."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although this model does not read it."""
        ...

    def finish(self) -> None:
        """All destinations are filled: weights take the form in which they are used; no destination is valid after."""
        ...

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """ids, positions int64 [T] → final hidden states [T, hidden], or of `rows` (int64 [R]) only: [R, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden] → fp32 [R, vocab_size], in `out` or in memory of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """How to make models of the architectures that share one module.

    parse: the folder's config.json → configuration, or ValueError naming the field and what is accepted.
    build: (configuration, device, dtype name, block_tokens) → a model with unset weights.
    """

    architectures: tuple[str, ...]
    parse: Callable[[dict[str, Any], Path], Any]
    build: Callable[[Any, torch.device, str, int], Model]
