"""The law: a GGUF file and the folder made from it are one model, and a file that is not served is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from safetensors.numpy import load_file

from engine_proc.checkpoint import convert as convert_module
from engine_proc.checkpoint.convert import convert
from engine_proc.checkpoint.gguf_model import shortest
from tests.unit import checkpoint_world as world
from tests.unit.checkpoint_world import Stored

VOCAB = len(world.byte_pair_metadata()["tokenizer.ggml.tokens"])


def quiet(done: int, total: int) -> None:
    """No progress wanted."""


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, Stored]) -> Path:
    path.write_bytes(world.gguf_bytes({**metadata, **world.byte_pair_metadata()}, tensors))
    return path


def made(path: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and the tensors."""
    folder.mkdir()
    convert(path, folder, quiet)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def values(tensor: Stored) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensor.data, dtype=np.float32).reshape(tensor.shape)


def query_and_key_norms(layers: int) -> dict[str, Stored]:
    norm = world.stored(np.linspace(0.5, 2, 16))
    return {f"blk.{layer}.{part}.weight": norm for layer in range(layers) for part in ("attn_q_norm", "attn_k_norm")}


def to_gguf_order(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What a converter to GGUF does to q and k: of each head the two halves of the rows become neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def test_llama_rows_return_to_the_order_of_halves(tmp_path: Path) -> None:
    tensors = world.llama_tensors(VOCAB, output=True)
    config, found = made(write(tmp_path / "m.gguf", world.architecture_metadata("llama"), tensors), tmp_path / "out")
    for part, name, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        weight = found[f"model.layers.1.self_attn.{name}.weight"]
        np.testing.assert_array_equal(to_gguf_order(weight, heads), values(tensors[f"blk.1.{part}.weight"]))
    np.testing.assert_array_equal(
        found["model.layers.0.self_attn.v_proj.weight"], values(tensors["blk.0.attn_v.weight"])
    )
    np.testing.assert_array_equal(found["lm_head.weight"], values(tensors["output.weight"]))
    assert len(found) == len(tensors)
    assert config["tie_word_embeddings"] is False
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_biases_of_q_and_k_are_reordered_too(tmp_path: Path) -> None:
    tensors = world.llama_tensors(VOCAB)
    draw = np.random.default_rng(5)
    for layer in range(2):
        for part, size in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64)):
            tensors[f"blk.{layer}.{part}.bias"] = world.stored(draw.standard_normal(size))
    config, found = made(write(tmp_path / "m.gguf", world.architecture_metadata("llama"), tensors), tmp_path / "out")
    bias = found["model.layers.0.self_attn.q_proj.bias"]
    np.testing.assert_array_equal(to_gguf_order(bias, 4), values(tensors["blk.0.attn_q.bias"]))
    assert config["attention_bias"] is True
    del tensors["blk.0.attn_output.bias"]
    with pytest.raises(ValueError, match=r"only attn_q, attn_k, attn_v have a bias"):
        made(write(tmp_path / "m.gguf", world.architecture_metadata("llama"), tensors), tmp_path / "out2")


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_other_architectures_keep_the_order(tmp_path: Path, name: str) -> None:
    tensors = world.llama_tensors(VOCAB)
    if name == "qwen3":
        tensors |= query_and_key_norms(2)
    _, found = made(write(tmp_path / "m.gguf", world.architecture_metadata(name), tensors), tmp_path / "out")
    np.testing.assert_array_equal(
        found["model.layers.0.self_attn.q_proj.weight"], values(tensors["blk.0.attn_q.weight"])
    )


def test_a_large_tensor_is_written_in_pieces_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = world.write_llama(tmp_path / "m.gguf", world.Q8_0)
    _, whole = made(path, tmp_path / "whole")
    monkeypatch.setattr(convert_module, "_PIECE_BYTES", 5000)
    _, pieces = made(path, tmp_path / "pieces")
    assert whole.keys() == pieces.keys()
    assert all(np.array_equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.parametrize(("kind", "dtype"), [(world.F16, "float16"), (world.F32, "float32"), (world.BF16, "bfloat16")])
def test_plain_types_stay_as_they_are_and_quantised_ones_become_fp32(tmp_path: Path, kind: int, dtype: str) -> None:
    path = world.write_llama(tmp_path / "m.gguf", kind)
    (tmp_path / "out").mkdir()
    convert(path, tmp_path / "out", quiet)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype
    header = header_of(tmp_path / "out" / "model.safetensors")
    short = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}[dtype]
    assert header["model.layers.0.self_attn.q_proj.weight"]["dtype"] == short
    assert header["model.norm.weight"]["dtype"] == "F32"
    (tmp_path / "packed").mkdir()
    convert(world.write_llama(tmp_path / "q.gguf", world.Q8_0), tmp_path / "packed", quiet)
    assert {entry["dtype"] for entry in header_of(tmp_path / "packed" / "model.safetensors").values()} == {"F32"}


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    del header["__metadata__"]
    return header


def test_half_precision_weights_survive_the_reordering_bit_for_bit(tmp_path: Path) -> None:
    tensors = world.llama_tensors(VOCAB, world.BF16)
    path = write(tmp_path / "m.gguf", world.architecture_metadata("llama"), tensors)
    (tmp_path / "out").mkdir()
    convert(path, tmp_path / "out", quiet)
    header, data = (
        header_of(tmp_path / "out" / "model.safetensors"),
        (tmp_path / "out" / "model.safetensors").read_bytes(),
    )
    start = 8 + int.from_bytes(data[:8], "little")
    first, end = header["model.layers.0.self_attn.k_proj.weight"]["data_offsets"]
    found = np.frombuffer(data[start + first : start + end], dtype=np.uint16).reshape(32, 64)
    expected = np.frombuffer(tensors["blk.0.attn_k.weight"].data, dtype=np.uint16).reshape(32, 64)
    np.testing.assert_array_equal(to_gguf_order(found, 2), expected)


def test_progress_ends_at_the_total_and_never_falls(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    (tmp_path / "out").mkdir()
    convert(world.write_llama(tmp_path / "m.gguf"), tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


def test_gemma3_norms_lose_their_one_and_its_hidden_settings_are_there(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in world.llama_tensors(VOCAB).items() if "blk" not in name}
    layer = {name[6:]: tensor for name, tensor in world.llama_tensors(VOCAB).items() if name.startswith("blk.0.")}
    for part in ("post_attention_norm.weight", "post_ffw_norm.weight"):
        layer[part] = world.stored(np.linspace(0.5, 2, 64))
    for index in range(7):
        tensors |= {f"blk.{index}.{part}": tensor for part, tensor in layer.items()}
    tensors |= query_and_key_norms(7)
    changes = {"attention.sliding_window": 32, "block_count": 7, "rope.freq_base": 1000000.0}
    metadata = world.architecture_metadata("gemma3", **changes)
    config, found = made(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out")
    np.testing.assert_array_equal(found["model.norm.weight"], values(tensors["output_norm.weight"]) - np.float32(1))
    np.testing.assert_array_equal(
        found["model.layers.3.post_feedforward_layernorm.weight"],
        values(layer["post_ffw_norm.weight"]) - np.float32(1),
    )
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], values(tensors["token_embd.weight"]))
    assert "model.layers.6.pre_feedforward_layernorm.weight" in found
    assert [kind == "full_attention" for kind in config["layer_types"]] == [False] * 5 + [True, False]
    expected = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 32,
        "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 16,
    }  # fmt: skip
    assert {key: config.get(key) for key in expected} == expected


@given(value=some.floats(min_value=2.0**-30, max_value=2.0**30, width=32))
def test_metadata_floats_are_the_shortest_decimals_that_mean_them(value: float) -> None:
    found = shortest(value)
    assert np.float32(found) == np.float32(value)
    digits = f"{found!r}".split("e")[0].replace(".", "").strip("0")
    assert len(digits) <= 9
    assert shortest(float(np.float32(1e-5))) == 1e-05


def llama31_factors(head_dim: int, theta: float, factor: float) -> np.ndarray[Any, Any]:
    """The divisors of the frequencies, pair by pair, as the published description of Llama 3.1 gives them."""
    found = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (index / head_dim)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found)


def test_the_table_of_llama_3_1_becomes_its_setting_again(tmp_path: Path) -> None:
    metadata = world.architecture_metadata("llama", **{"rope.freq_base": 500000.0})
    tensors = world.llama_tensors(VOCAB)
    tensors["rope_freqs.weight"] = world.stored(llama31_factors(16, 500000.0, 32.0))
    config, found = made(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out")
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert not any("rope" in name for name in found)
    tensors["rope_freqs.weight"] = world.stored(llama31_factors(16, 500000.0, 32.0) * np.linspace(1, 1.2, 8))
    with pytest.raises(ValueError, match=r"rope_freqs.weight is not that of a Llama 3.1 rope setting"):
        made(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out2")


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    base, tensors = world.architecture_metadata("llama"), world.llama_tensors(VOCAB)
    extra = {"blk.0.ssm_a.weight": world.stored(np.ones(4))}
    cases: list[tuple[dict[str, Any], dict[str, Stored], str]] = [
        (
            world.architecture_metadata("mamba"),
            tensors,
            r"'mamba' is not served; accepted are llama, qwen2, qwen3, gemma3",
        ),
        ({}, tensors, r"architecture None is not served"),
        (base, {**tensors, **extra}, r"tensor blk.0.ssm_a.weight has no place in LlamaForCausalLM"),
        (base | {"llama.block_count": 1}, tensors, r"blk.1.\w+.weight has no place in LlamaForCausalLM with 1 layers"),
        (base | {"llama.expert_count": 8}, tensors, r"llama.expert_count is 8; mixtures of experts"),
        (base | {"split.count": 2}, tensors, r"one part of a split model"),
        (
            base | {"llama.rope.scaling.type": "yarn"},
            tensors,
            r"rope.scaling.type is 'yarn'; accepted are none, linear",
        ),
        (base | {"llama.rope.dimension_count": 8}, tensors, r"rope.dimension_count differs from head size 16"),
        (base | {"llama.attention.head_count": 2}, tensors, r"attn_q.weight has 64 rows, expected are 32"),
        ({k: v for k, v in base.items() if "context" not in k}, tensors, r"llama.context_length .* not missing"),
        (base, {k: v for k, v in tensors.items() if k != "token_embd.weight"}, r"token_embd.weight is missing"),
        (base, {k: v for k, v in tensors.items() if k != "blk.1.attn_k.weight"}, r"blk.1.attn_k.weight is missing"),
        (base, {k: v for k, v in tensors.items() if k != "output_norm.weight"}, r"output_norm.weight is missing"),
        (base, tensors | {"token_embd.weight": world.stored(np.ones((9, 64)))}, r"more tokens than the 9 rows"),
    ]
    for index, (metadata, held, message) in enumerate(cases):
        with pytest.raises(ValueError, match=message) as caught:
            made(write(tmp_path / "m.gguf", metadata, held), tmp_path / f"out{index}")
        assert "m.gguf" in str(caught.value)
