"""Configuration of the llama family: reads config.json, refuses by name what the module does not compute."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_proc.models.base import AttentionShape
from engine_proc.models.rope import ROPE_TYPES, rope_type

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What tells the family's members apart. Sizes as in config.json."""

    architecture: str
    vocab_size: int
    context_length: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    theta: float
    rope_scaling: dict[str, Any] | None
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    block_tokens: int = 128

    @property
    def attention(self) -> AttentionShape:
        scale = self.head_dim**-0.5
        return AttentionShape(self.layers, self.heads, self.kv_heads, self.head_dim, scale, self.block_tokens)

    def numbers(self) -> dict[str, Any]:
        """Everything but the block size, which changes no number."""
        fields = asdict(self)
        del fields["block_tokens"]
        return fields


class _Fields:
    """Typed access to config.json; each error names the file and the field."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self._config = config
        self._where = folder / "config.json"

    def refuse(self, problem: str) -> ValueError:
        return ValueError(f"{self._where}: {problem}")

    def get(self, name: str, default: Any = None) -> Any:
        """A field, where null means absent."""
        value = self._config.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(f"{name} must be an integer above 0, not {value!r}")
        return value

    def number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.refuse(f"{name} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(f"{name} must be true or false, not {value!r}")
        return value


def parse(config: dict[str, Any], folder: Path) -> LlamaConfig:
    """config.json of `folder` → configuration; ValueError names what is missing, wrong or not served."""
    fields = _Fields(config, folder)
    architecture = str(config["architectures"][0])
    context = fields.count("max_position_embeddings")
    _refuse_unserved(fields, architecture, context)
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    hidden = fields.count("hidden_size")
    head_dim = fields.count("head_dim", max(hidden // heads, 1))
    if heads % kv_heads:
        raise fields.refuse(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise fields.refuse(f"head_dim must be even, not {head_dim}")
    rope = _rope(fields)
    attention_bias = fields.flag("attention_bias")
    return LlamaConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        context_length=context,
        hidden=hidden,
        layers=fields.count("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.count("intermediate_size"),
        eps=fields.number("rms_norm_eps", fields.get("rms_norm_eps", 1e-6)),
        theta=fields.number("rope_theta", rope.get("rope_theta", fields.get("rope_theta", 10000.0))),
        rope_scaling=rope if rope_type(rope) != "default" else None,
        tied=fields.flag("tie_word_embeddings"),
        qkv_bias=architecture == "Qwen2ForCausalLM" or (attention_bias and architecture != "MistralForCausalLM"),
        output_bias=attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=fields.flag("mlp_bias") and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _rope(fields: _Fields) -> dict[str, Any]:
    """The rope settings, wherever this version of the file keeps them ({} = none)."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise fields.refuse(f"rope_scaling must be an object, not {rope!r}")
    kind = rope_type(rope)
    if kind not in ROPE_TYPES:
        raise fields.refuse(f"rope_scaling type {kind!r} is not served; accepted are {', '.join(ROPE_TYPES)}")
    return rope


def _refuse_unserved(fields: _Fields, architecture: str, context: int) -> None:
    """What would change the numbers and is not computed here.

    Sliding windows: a window of at least the context length is the same as full attention and is accepted; a
    smaller one is refused, because this family keeps and reads all positions.
    """
    if fields.get("quantization_config") is not None:
        raise fields.refuse("quantization_config is not served; accepted are plain fp32, fp16 and bf16 weights")
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise fields.refuse(f"hidden_act {activation!r} is not served; accepted is silu")
    rotated = fields.get("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise fields.refuse(f"partial_rotary_factor {rotated!r} is not served; accepted is 1.0")
    slides = architecture == "MistralForCausalLM" or (
        architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and fields.flag("use_sliding_window")
    )
    window = fields.get("sliding_window")
    if slides and window is not None and fields.count("sliding_window") < context:
        raise fields.refuse(
            f"sliding_window {window} below max_position_embeddings {context} is not served; accepted is null, or a "
            f"window of at least the context (max_position_embeddings of at most {window} serves this model exactly)"
        )
