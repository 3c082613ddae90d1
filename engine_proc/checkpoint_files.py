"""Reading the tensors of a Hugging Face style folder, from one or several safetensors files."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine_proc.checkpoint.facts import read_json

_DTYPES = {"F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is and what it is like, known without reading it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """All tensors of a folder, mapped into memory and read when asked for. Close it after loading."""

    def __init__(self, folder: Path) -> None:
        """ValueError names the file that is missing, broken or of a dtype that is not read."""
        self._stack = ExitStack()
        self._readers: dict[Path, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            for path in _files(folder):
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(f"{path} does not exist")
        try:
            reader = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            names = list(reader.keys())
            for name in names:
                part = reader.get_slice(name)
                if name in self.tensors:
                    raise ValueError(f"{path}: tensor {name} is also in {self.tensors[name].file.name}")
                self.tensors[name] = StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
        self._readers[path] = reader

    def check_dtype(self, name: str) -> None:
        """ValueError if the tensor's stored dtype is not one that is read."""
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES:
            raise ValueError(
                f"{stored.file}: tensor {name} has dtype {stored.dtype}; accepted are {', '.join(sorted(_DTYPES))}"
            )

    def read(self, name: str) -> torch.Tensor:
        """The stored tensor, mapped and not copied; valid until `close`."""
        tensor: torch.Tensor = self._readers[self.tensors[name].file].get_tensor(name)
        return tensor

    def close(self) -> None:
        self._readers.clear()
        self._stack.close()


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: by its index, else the only one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must be an object of tensor name to file name")
    names = set(weight_map.values())
    for name in names:
        if not isinstance(name, str) or os.sep in name or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
    return [folder / name for name in sorted(names)]
