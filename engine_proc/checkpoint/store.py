"""The folder of converted models: each made once, under a lock, and visible only when it is whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Called as (what, done, total or 0 if unknown), in bytes; "what" is "download", "unpack" (in parts), "convert" or
# "wait" (another process is at it). In a download or a wait it is called five times a second even if nothing moves.
# It may raise, which ends the work at once.
Progress = Callable[[str, int, int], None]

_MARKER = "complete.json"
_POLL_SECONDS = 0.2


def entry(cache_dir: Path, name: str, digest: str) -> Path:
    """Where the model called `name` with this content digest (hex) lies, made or not."""
    return cache_dir / f"{name}-{digest[:12]}"


def is_complete(folder: Path, digest: str, version: int) -> bool:
    """The folder was finished from this content, by this version of the conversion, and its files have their sizes."""
    try:
        marker = json.loads((folder / _MARKER).read_text("utf-8"))
        same = marker["digest"] == digest and marker["version"] == version
        return same and all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def make(
    cache_dir: Path, name: str, digest: str, version: int, fill: Callable[[Path, Path], None], progress: Progress
) -> Path:
    """The complete folder; if it is not there, `fill(folder, scratch)` writes it (both are empty folders of its own).

    Safe for several processes and for a kill at any moment: what a killed one left is swept by the next. ValueError
    if the cache cannot be written (any OSError); all else that fill and progress raise passes through. Nothing is left
    behind by a failure.
    """
    final = entry(cache_dir, name, digest)
    if is_complete(final, digest, version):
        return final
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{final.name}.lock", progress):
            if not is_complete(final, digest, version):
                _make_anew(final, digest, version, fill)
    except OSError as error:
        raise ValueError(f"the model cache {cache_dir} cannot be used: {error}") from None
    return final


def _make_anew(final: Path, digest: str, version: int, fill: Callable[[Path, Path], None]) -> None:
    # Fixed names, because the lock's holder is the only user: so leftovers of a killed process are found.
    folder, scratch, old = (final.with_name(f".{final.name}.{kind}") for kind in ("partial", "scratch", "old"))
    leftovers = (folder, scratch, old)
    _remove(*leftovers)
    try:
        folder.mkdir()
        scratch.mkdir(mode=0o700)
        fill(folder, scratch)
        _finish(folder, digest, version)
        if final.exists():
            final.rename(old)  # made from other bytes or broken; who has it mapped keeps its pages
        folder.rename(final)
        _sync(final.parent)
    finally:
        _remove(*leftovers)


def _finish(folder: Path, digest: str, version: int) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    with (folder / _MARKER).open("x", encoding="utf-8") as file:
        json.dump({"digest": digest, "version": version, "files": files}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _sync(folder: Path) -> None:
    """The folder's names are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock file, which stays there: removing it would let two processes hold two locks of one name."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("wait", 0, 0)
                time.sleep(_POLL_SECONDS)
        yield
