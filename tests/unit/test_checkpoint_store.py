"""The law: a model in the cache is whole or not there, and made once, whoever works on it or is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_proc.checkpoint import store

DIGEST = "ab" * 32
ROOT = Path(__file__).resolve().parents[2]


def quiet(what: str, done: int, total: int) -> None:
    """No progress wanted."""


def writer(text: str, calls: list[str] | None = None) -> Callable[[Path, Path], None]:
    def fill(folder: Path, scratch: Path) -> None:
        assert not list(folder.iterdir())
        assert not list(scratch.iterdir())
        (scratch / "junk").write_text("junk")
        (folder / "model.txt").write_text(text)
        if calls is not None:
            calls.append(text)

    return fill


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_it_is_made_once_and_nothing_else_stays(tmp_path: Path) -> None:
    cache, calls = tmp_path / "a" / "b", list[str]()
    for _ in range(3):
        found = store.make(cache, "m", DIGEST, 1, writer("x", calls), quiet)
    assert found == cache / "m-abababababab"
    assert (found / "model.txt").read_text() == "x"
    assert calls == ["x"]
    assert visible(cache) == ["m-abababababab"]


@pytest.mark.parametrize("damage", ["version", "digest", "short", "gone", "marker", "no marker"])
def test_a_folder_that_is_not_the_wanted_one_is_made_anew(tmp_path: Path, damage: str) -> None:
    found = store.make(tmp_path, "m", DIGEST, 1, writer("old"), quiet)
    marker = found / "complete.json"
    held = json.loads(marker.read_text())
    if damage in ("version", "digest"):
        marker.write_text(json.dumps({**held, damage: 0}))
    elif damage == "short":
        (found / "model.txt").write_text("o")
    elif damage == "gone":
        (found / "model.txt").unlink()
    elif damage == "marker":
        marker.write_text('{"files"')
    else:
        marker.unlink()
    assert (store.make(tmp_path, "m", DIGEST, 1, writer("new"), quiet) / "model.txt").read_text() == "new"
    assert visible(tmp_path) == ["m-abababababab"]


def test_a_failure_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    class Cancelled(Exception):
        pass

    def fill(folder: Path, scratch: Path) -> None:
        (folder / "half").write_text("half")
        raise Cancelled

    with pytest.raises(Cancelled):
        store.make(tmp_path, "m", DIGEST, 1, fill, quiet)
    assert visible(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the model cache .*/file/cache cannot be used"):
        store.make(tmp_path / "file" / "cache", "m", DIGEST, 1, writer("x"), quiet)


MAKER = """
import sys, time
from pathlib import Path
from engine_proc.checkpoint import store
cache, note = Path(sys.argv[1]), Path(sys.argv[2])
def fill(folder, scratch):
    with note.open("a") as file:
        file.write("fill\\n")
    (folder / "a").write_text("one")
    print("filling", flush=True)
    if len(sys.argv) > 3:
        sys.stdin.readline()
    (folder / "b").write_text("two")
def progress(what, done, total):
    print(what, flush=True)
print(store.make(cache, "m", "ab" * 32, 1, fill, progress), flush=True)
"""


def start(cache: Path, note: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(cache), str(note), *more],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_processes_at_once_both_get_the_folder_and_one_makes_it(tmp_path: Path) -> None:
    cache, note = tmp_path / "cache", tmp_path / "note"
    first = start(cache, note, "wait")
    try:
        assert line_of(first) == "filling"
        second = start(cache, note)
        try:
            assert line_of(second) == "wait"
            assert not (cache / "m-abababababab").exists()
            assert first.communicate("\n", timeout=30)[0].strip().endswith("m-abababababab")
            assert second.communicate(timeout=30)[0].strip().endswith("m-abababababab")
        finally:
            second.kill()
            second.wait()
    finally:
        first.kill()
        first.wait()
    assert note.read_text() == "fill\n"
    assert (cache / "m-abababababab" / "b").read_text() == "two"


def test_what_a_killed_process_left_is_swept_and_made_anew(tmp_path: Path) -> None:
    cache, note = tmp_path / "cache", tmp_path / "note"
    first = start(cache, note, "wait")
    assert line_of(first) == "filling"
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=30)
    assert visible(cache) == [".m-abababababab.partial", ".m-abababababab.scratch"]
    begin = time.monotonic()
    found = store.make(cache, "m", DIGEST, 1, writer("x"), quiet)
    assert time.monotonic() - begin < 5
    assert (found / "model.txt").read_text() == "x"
    assert visible(cache) == ["m-abababababab"]
