"""Translates a GGUF file's model: metadata into config.json, tensor names and layouts into Hugging Face's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_proc.checkpoint.ggml_types import Floats
from engine_proc.checkpoint.gguf import GgufFile

Json = dict[str, Any]
Transform = Callable[[Floats], Floats]

_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_LAYER = _LLAMA_LAYER | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3_LAYER = _QWEN3_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")

# Gemma 3: each 6th layer sees everything; the 62-layer model scales queries by hidden / heads, not by head_dim.
_GEMMA3_FULL_EVERY = 6
_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class Architecture:
    """layer: GGUF names of a layer's parts → ours.

    interleaved: q and k rows lie in the interleaved rotary order. norm_plus_one: norms are stored as 1 + weight.
    """

    hf_name: str
    model_type: str
    layer: dict[str, str]
    interleaved: bool = False
    norm_plus_one: bool = False
    extra: Callable[[_Fields, Json], None] = field(default=lambda fields, config: None)


def shortest(value: float) -> float:
    """The float64 of the shortest decimal that rounds to the same float32: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


class _Fields:
    """Metadata of the architecture, by name below its prefix."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file = file
        self.prefix = prefix

    def refuse(self, problem: str) -> ValueError:
        return ValueError(f"{self.file.path}: {problem}")

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(f"{self.prefix}.{name} must be an integer above 0, not {_shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.refuse(f"{self.prefix}.{name} must be a number above 0, not {_shown(value)}")
        return shortest(value)


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]


def _rope_scaling(fields: _Fields, theta: float, head_dim: int) -> Json | None:
    kind = fields.get("rope.scaling.type")
    if _ROPE_FACTORS in fields.file.tensors:
        return _llama3_scaling(fields, theta, head_dim)
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
    raise fields.refuse(f"{fields.prefix}.rope.scaling.type is {kind!r}; accepted are none, linear")


def _llama3_scaling(fields: _Fields, theta: float, head_dim: int) -> Json:
    """Finds the Llama 3.1 setting behind a table of frequency divisors, which is all that the file keeps of it."""
    stored = fields.file.floats(_ROPE_FACTORS)[0]
    setting = {
        "factor": shortest(float(stored.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = setting["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - setting["low_freq_factor"]) / 3.0, 0.0, 1.0)
    expected = 1 / ((1 - smooth) / setting["factor"] + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise fields.refuse(f"{_ROPE_FACTORS} is not that of a Llama 3.1 rope setting, the only one accepted")
    return {"rope_type": "llama3", **setting}


def _llama_extra(fields: _Fields, config: Json) -> None:
    tensors = fields.file.tensors
    biased = [part for part in ("attn_q", "attn_k", "attn_v", "attn_output") if f"blk.0.{part}.bias" in tensors]
    if biased and len(biased) != 4:
        raise fields.refuse(f"only {', '.join(biased)} have a bias; accepted is a bias on all of attention or none")
    config["attention_bias"] = bool(biased)
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    window = fields.get("attention.sliding_window")
    if window:
        config["architectures"], config["model_type"] = ["MistralForCausalLM"], "mistral"
        config["sliding_window"] = fields.count("attention.sliding_window")


def _qwen3_extra(fields: _Fields, config: Json) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in fields.file.tensors


def _gemma3_extra(fields: _Fields, config: Json) -> None:
    layers = config["num_hidden_layers"]
    full = [(index + 1) % _GEMMA3_FULL_EVERY == 0 for index in range(layers)]
    config["layer_types"] = ["full_attention" if one else "sliding_attention" for one in full]
    config["sliding_window"] = fields.count("attention.sliding_window")
    config["rope_local_base_freq"] = fields.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
    config["hidden_activation"] = "gelu_pytorch_tanh"
    del config["hidden_act"]
    large = layers == _GEMMA3_27B_LAYERS
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    )
    config["final_logit_softcapping"] = None
    config["attn_logit_softcapping"] = None
    config["attention_bias"] = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", _LLAMA_LAYER, interleaved=True, extra=_llama_extra),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _LLAMA_LAYER),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _QWEN3_LAYER, extra=_qwen3_extra),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA3_LAYER, norm_plus_one=True, extra=_gemma3_extra),
}


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """The file's architecture; ValueError names it and the accepted ones."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"{file.path}: architecture {name!r} is not served; accepted are {', '.join(ARCHITECTURES)}")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ValueError(f"{file.path} is one part of a split model; join the parts with llama-gguf-split --merge")
    return name, ARCHITECTURES[name]


def config_json(file: GgufFile) -> Json:
    """config.json without token ids and dtype. ValueError names the metadata entry that is missing or not served."""
    name, architecture = architecture_of(file)
    fields = _Fields(file, name)
    if fields.get("expert_count"):
        raise fields.refuse(f"{name}.expert_count is {fields.get('expert_count')}; mixtures of experts are not served")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise fields.refuse("tensor token_embd.weight is missing or not a matrix")
    heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", hidden // heads)
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.refuse(f"{name}.attention.value_length differs from key_length {head_dim}, which is not served")
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise fields.refuse(f"{name}.rope.dimension_count differs from head size {head_dim}, which is not served")
    theta = fields.number("rope.freq_base", 10000.0)
    config: Json = {
        "architectures": [architecture.hf_name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": fields.count("context_length"),
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    scaling = _rope_scaling(fields, theta, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    architecture.extra(fields, config)
    return config


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the folder. transform works on whole groups of `rows` rows: fp32 [k * rows, n] → the same shape."""

    name: str
    source: str
    rows: int = 1
    transform: Transform | None = None


def _half_order(head_dim: int) -> Transform:
    """Rows of each head from (pair, half), the interleaved rotary order, to (half, pair)."""

    def reorder(rows: Floats) -> Floats:
        width = rows.shape[-1]
        split = rows.reshape(-1, head_dim // 2, 2, width).swapaxes(1, 2)
        return np.ascontiguousarray(split).reshape(-1, width)

    return reorder


def _minus_one(rows: Floats) -> Floats:
    return rows - np.float32(1)


def targets(file: GgufFile, config: Json) -> list[Target]:
    """Every tensor of the file in Hugging Face's naming; ValueError names a tensor with no place in the model."""
    _, architecture = architecture_of(file)
    _expect_all(file, architecture, config["num_hidden_layers"])
    found: list[Target] = []
    for name, info in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        target, part = _name(file, name, architecture, config["num_hidden_layers"])
        if architecture.interleaved and part in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            _expect_rows(file, name, heads * config["head_dim"])
            if len(info.shape) == 1:
                found.append(Target(target, name, 1, _bias_order(config["head_dim"])))
            else:
                found.append(Target(target, name, config["head_dim"], _half_order(config["head_dim"])))
        elif architecture.norm_plus_one and part.endswith("norm"):
            found.append(Target(target, name, 1, _minus_one))
        else:
            found.append(Target(target, name))
    return found


def _expect_all(file: GgufFile, architecture: Architecture, layers: int) -> None:
    """ValueError names a tensor without which the model is not whole."""
    needed = [f"blk.{layer}.{part}.weight" for layer in range(layers) for part in architecture.layer]
    needed.append("output_norm.weight")
    for name in needed:
        if name not in file.tensors:
            raise ValueError(f"{file.path}: tensor {name} is missing")


def _bias_order(head_dim: int) -> Transform:
    reorder = _half_order(head_dim)
    return lambda row: reorder(row.reshape(-1, 1)).reshape(1, -1)


def _expect_rows(file: GgufFile, name: str, rows: int) -> None:
    if file.tensors[name].shape[0] != rows:
        raise ValueError(f"{file.path}: tensor {name} has {file.tensors[name].shape[0]} rows, expected are {rows}")


def _name(file: GgufFile, name: str, architecture: Architecture, layers: int) -> tuple[str, str]:
    """(name in the folder, the part's name here)."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP and suffix == "weight":
        return f"{_TOP[stem]}.weight", stem
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in architecture.layer or int(match[1]) >= layers:
        raise ValueError(f"{file.path}: tensor {name} has no place in {architecture.hf_name} with {layers} layers")
    return f"model.layers.{match[1]}.{architecture.layer[match[2]]}.{match[3]}", match[2]
