"""Writes a safetensors file piece by piece, so that a model never has to fit memory."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to come: dtype is F32, F16 or BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _SIZES[self.dtype]


class SafetensorsWriter:
    """A file whose tensors are written in the planned order, each in as many pieces as one likes."""

    def __init__(self, path: Path, planned: list[Planned]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in planned:
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.size],
            }
            at += tensor.size
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % _ALIGNMENT)
        self.total = at
        self.written = 0
        self._file: BinaryIO = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, piece: npt.NDArray[np.generic]) -> None:
        """The next bytes, C-contiguous."""
        self._file.write(piece.reshape(-1).view(np.uint8).data)
        self.written += piece.nbytes

    def finish(self) -> None:
        """All is on the disk. RuntimeError if more or less was written than planned."""
        if self.written != self.total:
            raise RuntimeError(f"{self.written} bytes of tensors were written, {self.total} planned")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
