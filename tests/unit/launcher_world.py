"""What tests of the launcher share: a supervisor as a process, its children's notes, and who is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tests.unit.launcher_child import Behaviour
from tests.unit.launcher_top import Plan

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 20.0


class Top:
    """A supervisor process with children that behave as told."""

    def __init__(self, folder: Path, children: dict[str, dict[str, Any]], **times: float) -> None:
        """`children`: "role.index" -> fields of Behaviour."""
        self.notes_path, self.out, self.err = folder / "notes", folder / "out", folder / "err"
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.notes_path.touch()
        plan = Plan(str(self.run_dir), [], **times)
        for name, fields in children.items():
            role, _, index = name.partition(".")
            plan.children.append((role, int(index), Behaviour(str(self.notes_path), **fields)))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.launcher_top", msgspec.json.encode(plan).decode()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def notes(self) -> list[str]:
        return self.notes_path.read_text().splitlines()

    def starts(self, name: str) -> list[tuple[int, int]]:
        """(generation, pid) of each start of a child."""
        words = [line.split() for line in self.notes() if line.startswith(f"start {name} ")]
        return [(int(generation), int(pid)) for _, _, generation, pid in words]

    def until(self, what: str, done: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.said()}"
            time.sleep(0.01)

    def until_said(self, text: str, times: int = 1) -> None:
        """Until the launcher has printed `text` so often."""
        self.until(f"it says {text!r}", lambda: self.out.read_text().count(text) >= times)

    def until_serving(self) -> None:
        self.until_said("serving")

    def said(self) -> str:
        return f"{self.out.read_text()}\n{self.err.read_text()}\n{self.notes_path.read_text()}"

    def errors(self) -> list[str]:
        """The launcher's own lines on stderr."""
        return [line for line in self.err.read_text().splitlines() if line.startswith("deepinfer: ")]

    def left(self) -> list[int]:
        """Processes of its session that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def end(self, seconds: float) -> int:
        """Its exit code, once it has ended by itself; nothing of it is left then."""
        code = self.process.wait(seconds)
        assert not self.left(), self.said()
        return code


@contextmanager
def top(folder: Path, children: dict[str, dict[str, Any]], **times: float) -> Iterator[Top]:
    """A supervisor for the time of a with block; whatever is left of it then is killed."""
    found = Top(folder, children, **times)
    try:
        yield found
    finally:
        for pid in found.left():
            os.kill(pid, signal.SIGKILL)
        found.process.wait(10)
