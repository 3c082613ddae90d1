"""Tiny random checkpoints of every member of the llama family, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 320
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MEMBERS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama_biased": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_rope_llama3": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"head_dim": 16, "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    ),
    "llama_rope_linear": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"hidden_size": 48}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"head_dim": 16, "sliding_window": 1024}),
}


def make_checkpoint(folder: Path, member: str, **changes: Any) -> Any:
    """A tiny random checkpoint on disk whose norms and biases matter; → the transformers model."""
    config_class, model_class, fields = MEMBERS[member]
    torch.manual_seed(len(member))
    model = model_class(config_class(**(SIZES | fields | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return model
