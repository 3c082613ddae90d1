"""Turns a GGUF file into a Hugging Face style folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine_proc.checkpoint import gguf_model, gguf_tokenizer
from engine_proc.checkpoint.gguf import GgufFile, TensorInfo
from engine_proc.checkpoint.gguf_model import Target
from engine_proc.checkpoint.gguf_tokenizer import TokenizerFiles
from engine_proc.checkpoint.safetensors_writer import Planned, SafetensorsWriter

# Raised when the same file would give another folder: folders made before are then made anew.
FORMAT_VERSION = 1

_PIECE_BYTES = 32 << 20  # of fp32: bounds the memory of a conversion
_SPARE_BYTES = 64 << 20
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Progress = Callable[[int, int], None]


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Writes the model in `source` into `folder`, which is empty; progress(done, total) counts bytes written.

    A file with quantised tensors becomes fp32, the exact value of its weights; one without keeps each tensor's dtype,
    apart from norms that are stored with an offset. ValueError names what is broken or not served, or that the disk
    is full; what progress raises ends the conversion.
    """
    with GgufFile(source) as file:
        config = gguf_model.config_json(file)
        tokenizer = gguf_tokenizer.build(file.metadata, source)
        if len(tokenizer.tokenizer["model"]["vocab"]) > config["vocab_size"]:
            raise ValueError(f"{source}: more tokens than the {config['vocab_size']} rows of token_embd.weight")
        found = gguf_model.targets(file, config)
        _complete(config, tokenizer, file)
        _write_tensors(file, found, folder / "model.safetensors", progress)
        _write_json(folder / "tokenizer.json", tokenizer.tokenizer)
        _write_json(
            folder / "tokenizer_config.json",
            {**tokenizer.config, "model_max_length": config["max_position_embeddings"]},
        )
        _write_json(folder / "generation_config.json", _generation(tokenizer))
        _write_json(folder / "config.json", config)


def _complete(config: dict[str, Any], tokenizer: TokenizerFiles, file: GgufFile) -> None:
    for name, value in (("bos_token_id", tokenizer.bos_id), ("pad_token_id", tokenizer.pad_id)):
        if value is not None:
            config[name] = value
    if tokenizer.eos_ids:
        config["eos_token_id"] = tokenizer.eos_ids[0] if len(tokenizer.eos_ids) == 1 else list(tokenizer.eos_ids)
    config["torch_dtype"] = _TORCH_NAMES[_dtype(file, file.tensors["token_embd.weight"])]


def _generation(tokenizer: TokenizerFiles) -> dict[str, Any]:
    values = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids) or None,
        "pad_token_id": tokenizer.pad_id,
    }
    return {name: value for name, value in values.items() if value is not None}


def _dtype(file: GgufFile, info: TensorInfo) -> str:
    """The dtype that a tensor gets in the folder."""
    return "F32" if any(other.form.quantised for other in file.tensors.values()) else info.form.name


def _write_tensors(file: GgufFile, found: list[Target], path: Path, progress: Progress) -> None:
    quantised = any(info.form.quantised for info in file.tensors.values())
    planned = []
    for target in found:
        info = file.tensors[target.source]
        offset_norm = target.transform is not None and len(info.shape) == 1
        planned.append(Planned(target.name, "F32" if quantised or offset_norm else info.form.name, info.shape))
    writer = SafetensorsWriter(path, planned)
    try:
        free = shutil.disk_usage(path.parent).free
        if free < writer.total + _SPARE_BYTES:
            raise ValueError(
                f"{path.parent} needs {writer.total >> 20} MiB for the converted model; only {free >> 20} MiB are free"
            )
        progress(0, writer.total)
        for target, plan in zip(found, planned, strict=True):
            _write_tensor(file, target, plan, writer, progress)
        writer.finish()
    finally:
        writer.close()


def _write_tensor(file: GgufFile, target: Target, plan: Planned, writer: SafetensorsWriter, progress: Progress) -> None:
    info = file.tensors[target.source]
    groups = max(1, _PIECE_BYTES // (4 * info.shape[-1] * target.rows))
    step = groups * target.rows
    for first in range(0, info.rows, step):
        end = min(first + step, info.rows)
        if target.transform is None and plan.dtype == info.form.name:
            writer.write(file.raw(target.source, first, end))
        else:
            values = file.floats(target.source, first, end)
            values = values if target.transform is None else target.transform(values)
            writer.write(_stored(values, plan.dtype))
        progress(writer.written, writer.total)


def _stored(values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> np.ndarray[Any, Any]:
    """fp32 → the dtype of the folder; exact, because such values came from that dtype and only their order changed."""
    if dtype == "F32":
        return np.ascontiguousarray(values)
    if dtype == "F16":
        return values.astype(np.float16)
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=None if path.name == "tokenizer.json" else 2)
        file.flush()
        os.fsync(file.fileno())
