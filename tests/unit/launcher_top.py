"""A supervisor over children of `launcher_child`, as a process of its own: `python -m tests.unit.launcher_top JSON`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from launcher.children import ChildSpec
from launcher.console import Console
from launcher.signals import Signals
from launcher.supervisor import Supervisor
from tests.unit.launcher_child import Behaviour


class Plan(msgspec.Struct):
    """Children as (role, index, what it does), and the supervisor's times."""

    run_dir: str
    children: list[tuple[str, int, Behaviour]]
    start_seconds: float = 20.0
    drain_seconds: float = 5.0


class AlwaysHealthy:
    """There is no HTTP here: the service is healthy when its processes are ready."""

    healthy = False
    last = ""

    def start(self) -> None:
        self.healthy = True

    def stop(self) -> None:
        pass


def main() -> int:
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    specs = [
        ChildSpec("tests.unit.launcher_child", role, index, msgspec.json.encode(behaviour))
        for role, index, behaviour in plan.children
    ]
    supervisor = Supervisor(
        specs,
        Path(plan.run_dir),
        Console(),
        Signals(),
        AlwaysHealthy(),
        start_seconds=plan.start_seconds,
        drain_seconds=plan.drain_seconds,
        on_serving=lambda: print("serving", flush=True),
    )
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
