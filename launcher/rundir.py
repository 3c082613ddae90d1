"""The private folder of one start, for its sockets: a random name, mode 0700, a lock that tells whether it is alive.

The launcher holds an exclusive lock on the file `lock` in it for as long as it lives. A folder whose lock is free was
left by a launcher that was killed; the next start of the same user removes it. Others' folders are never touched.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from wire.link import MAX_SOCKET_PATH

LONGEST_SOCKET = "tokenizer.999.sock"
LOCK = "lock"
YOUNG_SECONDS = 60.0  # a folder without its lock file is being made, unless it is older than this


class RunDir:
    """`path` until `remove()`; an unlocked leftover if this process is killed."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path, self._lock_fd = path, lock_fd

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # its processes have ended; what resists is swept at a start
        os.close(self._lock_fd)


def bases(environment: Mapping[str, str]) -> list[Path]:
    """Folders that may hold run folders, best first: XDG_RUNTIME_DIR, TMPDIR, /tmp."""
    named = [environment.get("XDG_RUNTIME_DIR", ""), environment.get("TMPDIR", ""), "/tmp", tempfile.gettempdir()]
    found = [Path(name) for name in named if name and Path(name).is_absolute()]
    return list(dict.fromkeys(found))


def make(environment: Mapping[str, str]) -> RunDir:
    """A new folder, after the sweep. ValueError when no place is writable or all paths are too long."""
    problems = []
    places = bases(environment)
    for base in places:
        _sweep(base)
    for base in places:
        path = base / f"{_prefix()}{secrets.token_hex(8)}"
        if len(os.fsencode(path / LONGEST_SOCKET)) > MAX_SOCKET_PATH:
            problems.append(f"{base} is too long for a socket path of at most {MAX_SOCKET_PATH} bytes")
            continue
        try:
            path.mkdir(mode=0o700)
            return RunDir(path, _lock_new(path))
        except OSError as error:
            problems.append(f"{base}: {error.strerror}")
    raise ValueError(
        f"no folder for sockets ({'; '.join(problems)}); XDG_RUNTIME_DIR or TMPDIR must name a writable one"
    )


def _prefix() -> str:
    return f"deepinfer-{os.getuid()}-"


def _lock_new(folder: Path) -> int:
    """The lock file appears under its name when it is locked already: no sweep can come in between."""
    fresh = folder / f"{LOCK}.new"
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fresh.rename(folder / LOCK)
    return fd


def _sweep(base: Path) -> None:
    """Remove folders of this user whose launcher is dead."""
    try:
        found = [entry for entry in os.scandir(base) if entry.name.startswith(_prefix())]
    except OSError:
        return  # not there or not readable: nothing of ours can be in it
    for entry in found:
        try:
            facts = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
                _remove_if_dead(Path(entry.path), facts.st_mtime)
        except FileNotFoundError:
            continue  # another start was faster


def _remove_if_dead(folder: Path, changed: float) -> None:
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - changed > YOUNG_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # its launcher lives
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)
