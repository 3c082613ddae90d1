"""The law: the content digest is the same for the same numbers, wherever and however they are stored, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine_proc.loader import LoadedModel, load
from tests.model.checkpoints import make_checkpoint
from tests.model.unpacked import unpacked


def loaded(folder: Path, dtype: str = "fp32", load_format: str = "safetensors") -> LoadedModel:
    return load(folder, "cpu", dtype, load_format, lambda done, total: None, 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "qwen3")
    return tmp_path


def split(folder: Path) -> None:
    """The same tensors in two files with an index."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    path.unlink()


def test_the_digest_follows_content_not_storage(folder: Path) -> None:
    with unpacked():
        first = loaded(folder)
    assert loaded(folder).digest == first.digest and len(first.digest) == 64
    split(folder)
    with unpacked():
        again = loaded(folder)
    assert again.digest == first.digest
    for name, place in first.model.destinations().items():
        assert again.model.destinations()[name].equal(place)


def test_one_changed_bit_changes_the_digest(folder: Path) -> None:
    before = loaded(folder).digest
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert loaded(folder).digest != before


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_parameters", "architectures"])
def test_a_setting_that_changes_numbers_changes_the_digest(folder: Path, field: str) -> None:
    values = {"rms_norm_eps": 1e-4, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    before = loaded(folder).digest
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if field == "architectures":
        make_checkpoint(folder, "llama")
    else:
        path.write_text(json.dumps(config | {field: values[field]}))
    assert loaded(folder).digest != before


def test_a_setting_that_changes_no_number_keeps_the_digest(folder: Path) -> None:
    before = loaded(folder).digest
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_cache": False, "transformers_version": "x"}))
    assert loaded(folder).digest == before


def test_eos_ids_are_the_union_of_both_files(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 3]}))
    assert loaded(folder).eos_ids == [3, 7, 9]
    (folder / "generation_config.json").unlink()
    assert loaded(folder).eos_ids == [7]


def test_progress_counts_bytes_up_to_the_total(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(folder, "cpu", "bf16", "safetensors", lambda done, total: seen.append((done, total)), 16)
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert seen[-1] == (stored, stored)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_cache_spec_says_what_blocks_take(folder: Path) -> None:
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        spec = loaded(folder, dtype).model.cache_spec
        assert spec.block_bytes() == 3 * 2 * 16 * 2 * 32 * size
        assert dtype in spec.cache_format and spec.keep_tokens == 1


def test_random_weights_are_the_same_each_time_and_need_no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with unpacked():
        first, second = loaded(folder, "fp32", "random"), loaded(folder, "fp32", "random")
    assert first.digest == second.digest
    for name, place in first.model.destinations().items():
        assert second.model.destinations()[name].equal(place)
        assert bool(place.isfinite().all()) and (float(place.float().std()) > 0 or "norm" in name)
    assert first.model.destinations()["model.norm.weight"].eq(1).all()
