"""The law: a model of each family that goes through GGUF comes out as transformers had it: config, weights, logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine_proc.checkpoint.convert import convert
from tests.unit import checkpoint_world as world

VOCAB = len(world.byte_pair_metadata()["tokenizer.ggml.tokens"])
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}, {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}, {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}, {}),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 16, "rope_theta": 1e6,
         "rope_local_base_freq": 1e4},
        {"attention.sliding_window": 8, "block_count": 7, "rope.freq_base": 1e6},
    ),
}  # fmt: skip


def to_gguf(architecture: str, name: str, tensor: np.ndarray[Any, Any]) -> tuple[str, np.ndarray[Any, Any]]:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, suffix = name.rsplit(".", 1)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    part = top[stem] if match is None else (GEMMA if architecture == "gemma3" else NAMES)[match[2]]
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        tensor = tensor.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(tensor.shape)
    if architecture == "gemma3" and part.endswith("norm"):
        tensor = tensor + np.float32(1)
    return f"{part}.{suffix}" if match is None else f"blk.{match[1]}.{part}.{suffix}", tensor


@pytest.mark.parametrize("architecture", FAMILIES)
def test_config_weights_and_logits_come_back(tmp_path: Path, architecture: str) -> None:
    family, settings, changes = FAMILIES[architecture]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    for tensor in model.parameters():
        # Multiples of 2^-10 below 2, so that adding and subtracting 1 is exact; biases and norms are no longer 0 and 1.
        tensor.data = torch.randint(-200, 200, tensor.shape) / 1024
    tied = bool(config.tie_word_embeddings)
    tensors = {
        renamed: world.stored(values)
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
        for renamed, values in [to_gguf(architecture, name, tensor.numpy())]
    }
    metadata = {**world.architecture_metadata(architecture, **changes), **world.byte_pair_metadata()}
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    path.write_bytes(world.gguf_bytes(metadata, tensors))
    out.mkdir()
    convert(path, out, lambda done, total: None)
    loader: Any = transformers.AutoModelForCausalLM
    found, report = loader.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(found) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    ids = torch.arange(40)[None] % VOCAB
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    assert found.generation_config.eos_token_id == [2]


def test_transformers_reads_the_tokenizer_and_its_template(tmp_path: Path) -> None:
    convert_to = tmp_path / "out"
    convert_to.mkdir()
    convert(world.write_llama(tmp_path / "m.gguf"), convert_to, lambda done, total: None)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(convert_to)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_start|>", "<|im_end|>", 256)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], return_dict=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "the", "<|im_end|>"]
    assert tokenizer("the 1")["input_ids"] == tokenizer.convert_tokens_to_ids(["the", "Ġ", "1"])
