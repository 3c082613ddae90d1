"""A memory-mapped reader of GGUF files, versions 2 and 3: metadata, and tensors as raw blocks or as fp32."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_proc.checkpoint.ggml_types import FORMATS, OTHER_NAMES, BlockFormat, Bytes, Floats, dequantise

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MAX_DIMENSIONS = 4

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """shape: slowest dimension first, as numpy has it. offset, size: bytes in the file."""

    name: str
    form: BlockFormat
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufFile:
    """An open file. Metadata scalars are Python values, arrays of numbers numpy arrays, arrays of strings lists.

    Arrays and tensors are views of the mapped file: drop them before `close`, or leave the mapping to them.
    """

    def __init__(self, path: Path) -> None:
        """ValueError names the file and what is wrong with it."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
        except ValueError:
            raise ValueError(f"{path} is empty, not a GGUF file") from None
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._at = 0
        self._read_header()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the mapping up; views that still live keep it alive until they go."""
        self.metadata = {}
        self._bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            return  # a view is still in use: the mapping ends with it

    def _bad(self, problem: str) -> ValueError:
        return ValueError(f"{self.path} is not a usable GGUF file: {problem}")

    # --- header -------------------------------------------------------------------------------------------------

    def _read_header(self) -> None:
        if self._map[:4] != _MAGIC:
            raise self._bad(f"it begins with {self._map[:4]!r}, not {_MAGIC!r}")
        self._at = 4
        version = self._number("<I", "the version")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise self._bad("it is big-endian; accepted are little-endian files")
            raise self._bad(f"its version is {version}; accepted are {', '.join(map(str, _VERSIONS))}")
        tensors = self._number("<Q", "the number of tensors")
        pairs = self._number("<Q", "the number of metadata entries")
        for index in range(pairs):
            key = self._string(f"the key of metadata entry {index}")
            if key in self.metadata:
                raise self._bad(f"metadata key {key!r} occurs twice")
            self.metadata[key] = self._value(self._number("<I", f"the type of {key!r}"), key)
        self._read_infos(tensors)

    def _read_infos(self, count: int) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._bad(f"general.alignment is {alignment!r}, not a power of two")
        found = [self._info(index) for index in range(count)]
        start = -(-self._at // alignment) * alignment
        for name, form, shape, offset in found:
            if name in self.tensors:
                raise self._bad(f"tensor {name!r} occurs twice")
            if offset % alignment:
                raise self._bad(f"tensor {name!r} begins at {offset}, which is not a multiple of {alignment}")
            size = math.prod(shape) // form.block * form.size
            if start + offset + size > len(self._map):
                raise self._bad(
                    f"it is cut off: tensor {name!r} ends at byte {start + offset + size} of {len(self._map)}"
                )
            self.tensors[name] = TensorInfo(name, form, shape, start + offset, size)

    def _info(self, index: int) -> tuple[str, BlockFormat, tuple[int, ...], int]:
        name = self._string(f"the name of tensor {index}")
        dimensions = self._number("<I", f"the dimensions of tensor {name!r}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._bad(f"tensor {name!r} has {dimensions} dimensions; accepted are 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._number("<Q", f"the shape of tensor {name!r}") for _ in range(dimensions))[::-1]
        kind = self._number("<I", f"the type of tensor {name!r}")
        offset = self._number("<Q", f"the offset of tensor {name!r}")
        form = FORMATS.get(kind)
        if form is None:
            accepted = ", ".join(known.name for known in FORMATS.values())
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {OTHER_NAMES.get(kind, kind)}; accepted are {accepted}"
            )
        if 0 in shape:
            raise self._bad(f"tensor {name!r} has the empty shape {list(shape)}")
        if shape[-1] % form.block:
            raise self._bad(f"tensor {name!r} has rows of {shape[-1]}, not a multiple of {form.name}'s {form.block}")
        return name, form, shape, offset

    # --- primitives ---------------------------------------------------------------------------------------------

    def _take(self, size: int, what: str) -> int:
        """Moves past `size` bytes; where they begin. ValueError if the file ends before."""
        at = self._at
        if size > len(self._map) - at:
            raise self._bad(f"it is cut off in {what}, at byte {at} of {len(self._map)}")
        self._at = at + size
        return at

    def _number(self, form: str, what: str) -> int:
        value: int = struct.unpack_from(form, self._map, self._take(struct.calcsize(form), what))[0]
        return value

    def _string(self, what: str) -> str:
        size = self._number("<Q", what)
        at = self._take(size, what)
        try:
            return self._map[at : at + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self._bad(f"{what} is not UTF-8") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind == _ARRAY:
            item = self._number("<I", f"the item type of {key!r}")
            count = self._number("<Q", f"the length of {key!r}")
            return self._strings(count, key) if item == _STRING else self._numbers(item, count, key)
        value = self._numbers(kind, 1, key)[0]
        return bool(value) if kind == _BOOL else value.item()

    def _numbers(self, kind: int, count: int, key: str) -> Array:
        """A view; numbers in metadata are not aligned, which numpy copes with."""
        if kind not in _SCALARS:
            raise self._bad(f"the value of {key!r} has type {kind}, which does not exist here")
        form = np.dtype(_SCALARS[kind])
        at = self._take(form.itemsize * count, f"the value of {key!r}")
        return np.frombuffer(self._map, dtype=form, count=count, offset=at)

    def _strings(self, count: int, key: str) -> list[str]:
        """The hot loop: a vocabulary has hundreds of thousands of strings, so nothing is called twice for one."""
        data, end, at = self._map, len(self._map), self._at
        size_of = struct.Struct("<Q").unpack_from
        if count > (end - at) // 8:
            raise self._bad(f"it is cut off in the value of {key!r}, at byte {at} of {end}")
        found: list[str] = []
        try:
            for _ in range(count):
                stop = at + 8 + size_of(data, at)[0]
                if stop > end:
                    raise self._bad(f"it is cut off in the value of {key!r}, at byte {at} of {end}")
                found.append(data[at + 8 : stop].decode("utf-8"))
                at = stop
        except struct.error:
            raise self._bad(f"it is cut off in the value of {key!r}, at byte {at} of {end}") from None
        except UnicodeDecodeError:
            raise self._bad(f"item {len(found)} of {key!r} is not UTF-8") from None
        self._at = at
        return found

    # --- tensors ------------------------------------------------------------------------------------------------

    def raw(self, name: str, first: int = 0, end: int | None = None) -> Bytes:
        """uint8 view of the blocks of rows [first, end) of a tensor whose leading dimensions are flattened."""
        info = self.tensors[name]
        row = info.size // info.rows
        stop = info.rows if end is None else end
        return self._bytes[info.offset + first * row : info.offset + stop * row]

    def floats(self, name: str, first: int = 0, end: int | None = None) -> Floats:
        """fp32 [rows, row length] of the same rows."""
        info = self.tensors[name]
        return dequantise(self.raw(name, first, end), info.form).reshape(-1, info.shape[-1])
