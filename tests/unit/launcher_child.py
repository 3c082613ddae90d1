"""A child process for tests of the launcher: it does what its configuration says, in the real child frame.

Run by the supervisor as `python -m tests.unit.launcher_child`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

import msgspec

from wire.child import Child


class Behaviour(msgspec.Struct):
    """What this child does. `log` gets a line for each start and each control."""

    log: str
    fail: str = ""  # "exception" | "exit 0" | "exit 3" | "signal" | "error" | "hang" before it is ready
    fail_from: int = 1  # the first start that fails
    good: list[int] = []  # later starts that do not
    drain_ends: float = -1.0  # seconds after "drain" at which it ends; -1 = it ignores the drain
    deaf: bool = False  # it does not end by itself when told to stop


def note(behaviour: Behaviour, text: str) -> None:
    with Path(behaviour.log).open("a") as log:
        log.write(text + "\n")


def fail(child: Child, what: str) -> None:
    if what == "exception":
        raise RuntimeError("the weights are gone")
    if what.startswith("exit"):
        os._exit(int(what.split()[1]))
    if what == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "error":
        child.fail("no such weights: x.safetensors")
    while what == "hang":
        time.sleep(3600)


def main() -> None:
    child = Child.start()
    behaviour = child.config(Behaviour)
    note(behaviour, f"start {child.name} {child.generation} {os.getpid()}")
    starts = Path(behaviour.log).read_text().count(f"start {child.name} ")
    if behaviour.fail and starts >= behaviour.fail_from and starts not in behaviour.good:
        fail(child, behaviour.fail)
    child.phase("loading", 1, 2)
    child.ready()
    end = time.monotonic() + 3600.0
    while (left := end - time.monotonic()) > 0 and not (child.stopping and not behaviour.deaf):
        select.select([child], [], [], left)
        for control in child.controls():
            note(behaviour, f"{child.name} {control.what} {control.role}.{control.index} {control.generation}")
            if control.what == "drain" and behaviour.drain_ends >= 0:
                end = time.monotonic() + behaviour.drain_ends
    note(behaviour, f"end {child.name}")
    sys.exit(0)


if __name__ == "__main__":
    main()
