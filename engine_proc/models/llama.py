"""The llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3): one forward pass, told apart by configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine_proc.cache_spec import CacheSpec
from engine_proc.models import llama_config, rope
from engine_proc.models.base import DTYPES, Family, LayerAttention, Model
from engine_proc.models.linear import Linear
from engine_proc.models.llama_config import LlamaConfig
from engine_proc.models.ops import ops_for
from engine_proc.models.rotary import Rotary


@dataclass(slots=True)
class _Layer:
    """Weights of one layer; q, k, v and gate, up lie behind each other so that each is one product."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Weights and forward pass of one model; see `models.base.Model` for the methods."""

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: str, block_tokens: int) -> None:
        self.config = replace(config, block_tokens=block_tokens)
        self.device = device
        self.dtype = DTYPES[dtype]
        self.cache_spec = _cache_spec(self.config, dtype)
        self._ops = ops_for(device)
        self._embedding = self._empty(config.vocab_size, config.hidden)
        self._head = Linear(self._embedding if config.tied else self._empty(config.vocab_size, config.hidden), None)
        self._norm = self._empty(config.hidden)
        self._layers = [self._new_layer() for _ in range(config.layers)]
        self._frequencies = rope.inverse_frequencies(config.head_dim, config.theta, config.rope_scaling).to(device)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _linear(self, rows: int, columns: int, bias: bool) -> Linear:
        return Linear(self._empty(rows, columns), self._empty(rows) if bias else None)

    def _new_layer(self) -> _Layer:
        c = self.config
        return _Layer(
            input_norm=self._empty(c.hidden),
            qkv=self._linear((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden, c.qkv_bias),
            qk_norms=(self._empty(c.head_dim), self._empty(c.head_dim)) if c.qk_norm else None,
            output=self._linear(c.hidden, c.heads * c.head_dim, c.output_bias),
            post_norm=self._empty(c.hidden),
            gate_up=self._linear(2 * c.intermediate, c.hidden, c.mlp_bias),
            down=self._linear(c.hidden, c.intermediate, c.mlp_bias),
        )

    def destinations(self) -> dict[str, torch.Tensor]:
        found = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not self.config.tied:
            found["lm_head.weight"], _ = self._head.parts(0, self.config.vocab_size)
        for index, layer in enumerate(self._layers):
            for name, view in self._layer_destinations(layer).items():
                found[f"model.layers.{index}.{name}"] = view
        return found

    def _layer_destinations(self, layer: _Layer) -> dict[str, torch.Tensor]:
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        parts: list[tuple[str, Linear, int, int]] = [
            ("self_attn.q_proj", layer.qkv, 0, q),
            ("self_attn.k_proj", layer.qkv, q, q + kv),
            ("self_attn.v_proj", layer.qkv, q + kv, q + 2 * kv),
            ("self_attn.o_proj", layer.output, 0, c.hidden),
            ("mlp.gate_proj", layer.gate_up, 0, c.intermediate),
            ("mlp.up_proj", layer.gate_up, c.intermediate, 2 * c.intermediate),
            ("mlp.down_proj", layer.down, 0, c.hidden),
        ]
        found = {"input_layernorm.weight": layer.input_norm, "post_attention_layernorm.weight": layer.post_norm}
        for name, linear, first, end in parts:
            weight, bias = linear.parts(first, end)
            found[f"{name}.weight"] = weight
            if bias is not None:
                found[f"{name}.bias"] = bias
        if layer.qk_norms is not None:
            found["self_attn.q_norm.weight"], found["self_attn.k_norm.weight"] = layer.qk_norms
        return found

    def ignores(self, name: str) -> bool:
        """Old checkpoints store the rotary table; tied ones may store the head a second time."""
        return name.endswith(".rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight")

    def finish(self) -> None:
        for layer in self._layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.pack()
        self._head.pack(share=self.config.tied)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention, rows: torch.Tensor | None
    ) -> torch.Tensor:
        c, ops = self.config, self._ops
        cos, sin = rope.rotation(positions, self._frequencies, self.dtype)
        x = F.embedding(ids, self._embedding)
        h = ops.norm(x, self._layers[0].input_norm, c.eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(h).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            attended = attention.attend(index, qkv, Rotary(cos, sin, layer.qk_norms, c.eps))
            if index == last and rows is not None:  # after the last attention only the asked rows matter
                attended, x = attended.index_select(0, rows), x.index_select(0, rows)
            x, h = ops.add_norm(x, layer.output(attended), layer.post_norm, c.eps)
            next_norm = self._norm if index == last else self._layers[index + 1].input_norm
            x, h = ops.add_norm(x, layer.down(ops.silu_mul(layer.gate_up(h))), next_norm, c.eps)
        return h

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._head.wide(hidden, out)


def _cache_spec(config: LlamaConfig, dtype: str) -> CacheSpec:
    """K and V of every layer, each [block_tokens, kv_heads, head_dim] per block."""
    bytes_each = config.block_tokens * config.kv_heads * config.head_dim * DTYPES[dtype].itemsize
    return CacheSpec(
        layers=config.layers,
        block_tokens=config.block_tokens,
        block_record_bytes=(2 * bytes_each,) * config.layers,
        cache_format=f"kv/{dtype}/{config.layers}x2x{config.block_tokens}x{config.kv_heads}x{config.head_dim}/rotated",
    )


def _build(config: Any, device: torch.device, dtype: str, block_tokens: int) -> Model:
    return Llama(config, device, dtype, block_tokens)


def _parse(config: dict[str, Any], folder: Path) -> LlamaConfig:
    return llama_config.parse(config, folder)


FAMILY = Family(llama_config.ARCHITECTURES, _parse, _build)
