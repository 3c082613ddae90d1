"""Loading a model: folder → weights on the device, with the content digest made on the way."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_proc.checkpoint.facts import eos_ids, generation_config, read_json
from engine_proc.checkpoint_files import Checkpoint
from engine_proc.models.base import DTYPES, Model
from engine_proc.models.registry import family_of

LOAD_FORMATS = ("safetensors", "random")
_RANDOM_SEED = 20_240_229
_RANDOM_SCALE = 0.02  # the usual initial deviation of these families

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and what others must know of it."""

    model: Model
    digest: str  # hex, over names, dtypes, shapes, bytes of all tensors and the fields that change numbers
    dtype: str  # "fp32" | "bf16"
    vocab_size: int
    context_length: int
    eos_ids: list[int]


def load(
    model_dir: Path,
    device: str,
    dtype: str,
    load_format: str,
    progress: Progress,
    block_tokens: int = 128,
) -> LoadedModel:
    """Reads `model_dir` onto `device` ("cpu", "cuda" or "cuda:N") in `dtype` ("fp32", "bf16", "auto").

    `progress(done, total)` counts bytes read and is called from loader threads, one at a time. load_format "random"
    reads config.json only and makes the weights on the device from a fixed seed. Raises ValueError with one line
    that names the file, tensor or field and what is accepted.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"unknown load format {load_format!r}; accepted are {', '.join(LOAD_FORMATS)}")
    place = _device(device)
    name = _dtype_name(dtype, place)
    fields = read_json(model_dir / "config.json")
    family = family_of(fields, model_dir)
    config = family.parse(fields, model_dir)
    ends = eos_ids(model_dir, fields, generation_config(model_dir))
    with torch.inference_mode():
        model = family.build(config, place, name, block_tokens)
        contents = _fill_random(model) if load_format == "random" else _fill(model, model_dir, progress)
        model.finish()
    digest = hashlib.sha256()
    digest.update(json.dumps(config.numbers(), sort_keys=True).encode())
    digest.update(contents)
    return LoadedModel(model, digest.hexdigest(), name, config.vocab_size, config.context_length, ends)


def _device(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"unknown device {name!r}; accepted are cpu, cuda, cuda:N")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if int(index or 0) >= count:
        raise ValueError(f"device {name!r} does not exist; torch {torch.__version__} sees {count} CUDA devices")
    return torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")


def _dtype_name(dtype: str, device: torch.device) -> str:
    if dtype == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; accepted are auto, {', '.join(DTYPES)}")
    return dtype


def _fill(model: Model, folder: Path, progress: Progress) -> bytes:
    """Copies every tensor to its place and hashes its stored bytes, on a few threads; → the digest of them all."""
    checkpoint = Checkpoint(folder)
    try:
        destinations = model.destinations()
        _check_names(model, checkpoint, destinations, folder)
        filler = _Filler(checkpoint, destinations, progress)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "loader") as pool:
            digests = list(pool.map(filler.fill, sorted(destinations)))
    finally:
        checkpoint.close()
    return hashlib.sha256(b"".join(digests)).digest()


def _check_names(model: Model, checkpoint: Checkpoint, destinations: dict[str, Any], folder: Path) -> None:
    missing = sorted(destinations.keys() - checkpoint.tensors.keys())
    if missing:
        raise ValueError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} missing in all)")
    extra = sorted(name for name in checkpoint.tensors.keys() - destinations.keys() if not model.ignores(name))
    if extra:
        raise ValueError(f"{folder}: tensor {extra[0]} is not part of this architecture ({len(extra)} such in all)")
    for name, place in destinations.items():
        stored = checkpoint.tensors[name]
        checkpoint.check_dtype(name)
        if stored.shape != tuple(place.shape):
            raise ValueError(
                f"{stored.file}: tensor {name} has shape {list(stored.shape)}, config.json asks for {list(place.shape)}"
            )


class _Filler:
    """What loader threads share."""

    def __init__(self, checkpoint: Checkpoint, destinations: dict[str, torch.Tensor], progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._destinations = destinations
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._total = sum(
            destinations[name].numel() * (4 if checkpoint.tensors[name].dtype == "F32" else 2) for name in destinations
        )

    def fill(self, name: str) -> bytes:
        """One tensor: copied to its place; → digest of name, stored dtype, shape and bytes."""
        stored = self._checkpoint.tensors[name]
        tensor = self._checkpoint.read(name)
        raw = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
        digest = hashlib.sha256(json.dumps([name, stored.dtype, stored.shape]).encode())
        digest.update(raw)
        with torch.inference_mode():
            self._destinations[name].copy_(tensor)
        with self._lock:
            self._done += raw.nbytes
            self._progress(self._done, self._total)
        return digest.digest()


def _fill_random(model: Model) -> bytes:
    """Norms 1, biases 0, everything else normal; → a digest that stands for the seed."""
    generator = torch.Generator(model.device).manual_seed(_RANDOM_SEED)
    for name, place in sorted(model.destinations().items()):
        if name.endswith("norm.weight"):
            place.fill_(1.0)
        elif name.endswith(".bias"):
            place.zero_()
        else:
            place.normal_(0.0, _RANDOM_SCALE, generator=generator)
    return f"random/{_RANDOM_SEED}/{_RANDOM_SCALE}/{model.device.type}/{model.dtype}".encode()
