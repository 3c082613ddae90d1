"""What tests of process life share: a launcher that need not become ready, and everything that it may leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.pipeline.harness import ROOT, TINY, kill_all, role_of
from tests.pipeline.web import poll

MOCK = ("--engine", "mock", "--model", str(TINY), "--port", "0")
TORCH = ("--engine", "torch", "--model", str(TINY), "--load-format", "random", "--port", "0", "--device-blocks", "64")


class Launch:
    """`python launch.py` in a session of its own, with its own place for run folders."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err, self.port_file = folder / "out", folder / "err", folder / "port"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "launch.py", "--port-file", str(self.port_file), *flags],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def said(self) -> str:
        return f"{self.out.read_text()}\n{self.err.read_text()}"

    def lines(self) -> list[str]:
        """The launcher's own lines on stderr: what is wrong."""
        heads = ("deepinfer: ", "launch.py: ")
        return [line for line in self.err.read_text().splitlines() if line.startswith(heads)]

    def processes(self) -> list[psutil.Process]:
        """All of its session that still run, the launcher included."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def roles(self) -> dict[str, psutil.Process]:
        """A process of each role."""
        return {role: process for process in self.processes() if (role := role_of(process))}

    def port(self) -> int:
        """The HTTP port, from the line that tells what is started."""
        poll("it tells its port", lambda: "http://127.0.0.1:" in self.out.read_text(), 30)
        return int(self.out.read_text().partition("http://127.0.0.1:")[2].partition(",")[0].partition("/")[0])

    def wait_ready(self, seconds: float = 60.0) -> int:
        def ready() -> bool:
            assert self.process.poll() is None, self.said()
            return self.port_file.exists()

        try:
            poll("it is ready", ready, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None
        return int(self.port_file.read_text())

    def end(self, seconds: float) -> int:
        """Its exit code, once it has ended by itself; nothing of it is left."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds} s\n{self.said()}") from None
        assert not self.processes(), self.said()
        return code

    def gone(self, seconds: float) -> None:
        """Until none of its processes is left."""
        poll("all of its processes have ended", lambda: not self.processes(), seconds)


@contextmanager
def launch(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Launch]:
    """A launcher for the time of a with block; whatever is left of it then is killed."""
    found = Launch(folder, *flags, env=env)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.send_signal(signal.SIGTERM)
            found.process.send_signal(signal.SIGTERM)
            try:
                found.process.wait(10)
            except subprocess.TimeoutExpired:
                found.process.kill()
        kill_all(found.processes())
        found.process.wait(5)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True
