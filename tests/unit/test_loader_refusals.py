"""The law: what cannot be served exactly is refused in one line that names the thing and what is accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_proc.loader import LoadedModel, load
from tests.model.checkpoints import make_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama")
    return tmp_path


def loaded(folder: Path, dtype: str = "fp32", load_format: str = "safetensors", device: str = "cpu") -> LoadedModel:
    return load(folder, device, dtype, load_format, lambda done, total: None, 16)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unknown architecture 'GPT2LMHeadModel'; served are LlamaForCausalLM"),
        ({"architectures": []}, "unknown architecture None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served; accepted is silu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling type 'yarn' is not served; accepted"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' is not served; accepted are default, linear"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not served"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not served"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer above 0"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 must be a multiple of num_key_value_heads 4"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0"),
        ({"max_position_embeddings": None}, "max_position_embeddings must be an integer"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": [-1]}, "eos_token_id must be a token id"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 512},
            "sliding_window 512 below max_position_embeddings 1024 is not served",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 512},
            "sliding_window 512 below",
        ),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_name(folder: Path, fields: dict[str, Any], words: str) -> None:
    change(folder, **fields)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        loaded(folder)
    assert "\n" not in str(error.value)


def test_a_window_that_covers_the_context_is_full_attention(folder: Path) -> None:
    change(folder, architectures=["MistralForCausalLM"], sliding_window=1024)
    assert loaded(folder).context_length == 1024


def test_tensors_that_do_not_fit_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = "model.layers.1.input_layernorm.weight"
    for changes, words in (
        ({norm: None}, f"tensor {norm} is missing (1 missing in all)"),
        ({"model.layers.9.extra": torch.zeros(2)}, "tensor model.layers.9.extra is not part of this architecture"),
        ({norm: torch.zeros(7)}, f"tensor {norm} has shape [7], config.json asks for [96]"),
        ({norm: torch.zeros(96, dtype=torch.int8)}, f"tensor {norm} has dtype I8; accepted are BF16, F16, F32"),
    ):
        save_file({name: value for name, value in (tensors | changes).items() if value is not None}, path)
        with pytest.raises(ValueError, match=re.escape(words)):
            loaded(folder)


def test_files_that_are_missing_or_broken_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2], b"\xff" * 64):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
            loaded(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors does not exist"):
        loaded(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(ValueError, match="is not the name of a safetensors file in this folder"):
        loaded(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        loaded(folder)
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        loaded(folder / "nowhere")


def test_unknown_devices_dtypes_and_formats_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown device 'tpu'; accepted are cpu, cuda, cuda:N"):
        loaded(folder, device="tpu")
    with pytest.raises(ValueError, match="device 'cuda:99' does not exist"):
        loaded(folder, device="cuda:99")
    with pytest.raises(ValueError, match="unknown dtype 'int8'; accepted are auto, fp32, bf16"):
        loaded(folder, dtype="int8")
    with pytest.raises(ValueError, match="unknown load format 'gguf'; accepted are safetensors, random"):
        loaded(folder, load_format="gguf")
