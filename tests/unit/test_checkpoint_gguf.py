"""The law: the GGUF reader gives back what was written, and any broken file is a ValueError that names the file."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from engine_proc.checkpoint.gguf import GgufFile
from tests.unit import checkpoint_world as world

METADATA = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.count": 7,
    "a.number": 1e-5,
    "a.strings": ["one", "zwei", "三", ""],
    "a.ints": [1, -2, 3],
    "a.floats": [0.5, -1.5],
}


def tensors() -> dict[str, world.Stored]:
    draw = np.random.default_rng(3)
    return {
        "plain": world.stored(draw.standard_normal((5, 3))),
        "row": world.stored(draw.standard_normal(7), world.F16),
        "packed": world.stored(draw.standard_normal((4, 64)), world.Q8_0),
        "half": world.stored(draw.standard_normal((2, 3, 4)), world.BF16),
    }


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64])
def test_metadata_and_tensors_come_back(tmp_path: Path, version: int, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    written = tensors()
    path.write_bytes(world.gguf_bytes({**METADATA, "general.alignment": alignment}, written, version, alignment))
    with GgufFile(path) as file:
        assert file.metadata["a.strings"] == METADATA["a.strings"]
        assert file.metadata["a.flag"] is True
        assert (file.metadata["a.count"], type(file.metadata["a.count"])) == (7, int)
        assert file.metadata["a.number"] == np.float32(1e-5)
        assert file.metadata["a.ints"].tolist() == [1, -2, 3]
        assert file.metadata["a.floats"].tolist() == [0.5, -1.5]
        assert {name: info.shape for name, info in file.tensors.items()} == {n: t.shape for n, t in written.items()}
        for name, tensor in written.items():
            assert file.raw(name).tobytes() == tensor.data
        expected = np.frombuffer(written["plain"].data, dtype=np.float32).reshape(5, 3)
        np.testing.assert_array_equal(file.floats("plain"), expected)
        np.testing.assert_array_equal(file.floats("packed", 1, 3), file.floats("packed")[1:3])
        assert file.floats("half").shape == (6, 4)


@given(at=some.floats(0, 1, exclude_max=True))
def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory, at: float) -> None:
    whole = world.gguf_bytes(METADATA, tensors())
    path = tmp_path_factory.mktemp("cut") / "short.gguf"
    path.write_bytes(whole[: int(at * len(whole))])
    with pytest.raises(ValueError, match=r"short\.gguf is (empty|not a usable GGUF file: )"):
        GgufFile(path)


@given(flips=some.lists(some.tuples(some.integers(0, 10**9), some.integers(1, 255)), min_size=1, max_size=4))
def test_any_flipped_header_bytes_end_in_a_value_error_or_a_readable_file(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    whole = bytearray(world.gguf_bytes(METADATA, tensors()))
    for at, change in flips:
        whole[at % len(whole)] ^= change
    path = tmp_path_factory.mktemp("flip") / "odd.gguf"
    path.write_bytes(whole)
    try:
        with GgufFile(path) as file, np.errstate(all="ignore"):
            for name in file.tensors:
                file.floats(name)
    except ValueError as error:
        assert "odd.gguf" in str(error)


def test_a_vocabulary_of_262144_is_read_in_a_second(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(world.gguf_bytes({"t": [f"token{index}" for index in range(262_144)]}, {}))
    begin = time.perf_counter()
    with GgufFile(path) as file:
        assert len(file.metadata["t"]) == 262_144
        assert file.metadata["t"][-1] == "token262143"
    assert time.perf_counter() - begin < 5


def test_refusals_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    good = {"x": world.stored(np.ones((2, 4)))}
    cases = [
        (b"GGML" + b"\0" * 60, r"begins with b'GGML'"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 60, r"its version is 1; accepted are 2, 3"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 60, r"big-endian"),
        (
            world.gguf_bytes({}, {"x": world.Stored(10, (256,), b"\0" * 84)}),
            r"'x' has type Q2_K; accepted are F32, F16",
        ),
        (world.gguf_bytes({}, {"x": world.Stored(99, (4,), b"\0" * 16)}), r"'x' has type 99; accepted are F32"),
        (world.gguf_bytes({}, {"x": world.Stored(8, (33,), b"\0" * 68)}), r"rows of 33, not a multiple of Q8_0's 32"),
        (world.gguf_bytes({}, {"x": world.Stored(0, (0, 4), b"")}), r"'x' has the empty shape \[0, 4\]"),
        (world.gguf_bytes({}, {"x": world.Stored(0, (1,) * 5, b"\0" * 4)}), r"'x' has 5 dimensions"),
        (world.gguf_bytes({"general.alignment": 48}, good), r"general.alignment is 48, not a power of two"),
        (world.gguf_bytes({"k": "v"}, good).replace(b"\x01\0\0\0\0\0\0\0v", b"\x01\0\0\0\0\0\0\0\xff"), r"not UTF-8"),
    ]
    for data, message in cases:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message) as caught:
            GgufFile(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match=r"gone\.gguf cannot be read"):
        GgufFile(tmp_path / "gone.gguf")
