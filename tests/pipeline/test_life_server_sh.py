"""serve/server.sh runs the service in the background: start waits for readiness, stop drains, status tells."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.pipeline.harness import ROOT, TINY, kill_all
from tests.pipeline.web import Client, poll

FLAGS = ("--engine", "mock", "--model", str(TINY), "--port", "0")


class Script:
    """The script with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "serve" / "server.sh"), "-d", str(self.folder), *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, cwd="/", stdin=subprocess.DEVNULL
        )

    def pid(self) -> int:
        return int((self.folder / "pid").read_text().split()[0])

    def group(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self.last and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    last = -1


@pytest.fixture
def script() -> Iterator[Script]:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        found = Script(Path(base) / "server")
        yield found
        kill_all(found.group())


def test_start_status_stop(script: Script) -> None:
    assert script("status").returncode == 3
    started = script("start", *FLAGS)
    assert started.returncode == 0, started.stderr
    script.last = script.pid()
    assert stat.S_IMODE(script.folder.stat().st_mode) == 0o700
    port = int((script.folder / "port").read_text())
    assert f"port {port}" in started.stdout
    assert Client("127.0.0.1", port).get("/health").status == 200
    assert os.getpgid(script.last) == script.last, "a process group of its own"
    assert len(script.group()) == 5
    told = script("status")
    assert told.returncode == 0
    assert str(script.last) in told.stdout
    second = script("start", *FLAGS)
    assert second.returncode == 1
    assert "runs already" in second.stderr
    stopped = script("stop")
    assert stopped.returncode == 0
    assert not script.group()
    assert script("status").returncode == 3
    assert script("stop").returncode == 0, "stopping what does not run is no error"


def test_a_start_that_fails_says_why(script: Script) -> None:
    failed = script("start", "--dp", "none")
    assert failed.returncode == 2
    assert "argument --dp: 'none' is not an integer from 1 to 256" in failed.stderr
    failed = script("start", *FLAGS, "--model", "/no/such/model")
    assert failed.returncode == 1
    assert "'/no/such/model' does not exist" in failed.stderr
    assert script("status").returncode == 3


def test_a_killed_launcher_is_not_taken_for_a_running_one(script: Script) -> None:
    assert script("start", *FLAGS).returncode == 0
    script.last = script.pid()
    os.kill(script.last, signal.SIGKILL)
    poll("its children end", lambda: not script.group(), 5)
    assert script("status").returncode == 3
    ours = str(os.getpid())
    (script.folder / "pid").write_text(f"{ours} 1\n")  # the number went to another process since
    assert script("status").returncode == 3
    assert script("stop").returncode == 0
    again = script("start", *FLAGS)
    assert again.returncode == 0, again.stderr
    script.last = script.pid()
    assert script("stop").returncode == 0


def test_usage(script: Script) -> None:
    for words in ((), ("restart",), ("stop", "now")):
        told = script(*words)
        assert told.returncode == 2
        assert "usage: serve/server.sh" in told.stderr
