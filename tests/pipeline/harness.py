"""A service started by its launcher, watched and ended: what every pipeline test runs against."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.pipeline.web import Client, poll

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "fixtures" / "tiny"
START_SECONDS = 60.0
IDLE_SECONDS = 2.0
SLACK = 5.0  # times in behaviours are asserted with this factor
METRIC = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")
ROLES = {
    "frontend.main": "frontend",
    "tokenizer_proc.main": "tokenizer",
    "router_proc.main": "router",
    "engine_proc.main": "engine",
    "engine_proc.mock_main": "engine",
}
POOLS = ("gpu_pages", "swa_slots", "host_pages")
MUST_BE_ZERO = (
    "requests_running",
    "requests_waiting",
    "frontend_live_requests",
    "tokenizer_live_requests",
    "engine_inflight",
    "gpu_pages_pinned",
    "host_pages_pinned",
    "kvnet_transfers_open",
)
LIVE: list[Service] = []  # services that run now: after each test the idle invariant must hold for them


class Metrics:
    """One reading of /metrics: sample name with labels -> value."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, float] = {}
        self.text = text
        for line in text.splitlines():
            if line and not line.startswith("#"):
                found = METRIC.match(line)
                assert found, f"not a Prometheus sample: {line!r}"
                labels = f"{{{found['labels']}}}" if found["labels"] else ""
                self.samples[found["name"] + labels] = float(found["value"])

    def each(self, name: str) -> dict[str, float]:
        """Samples of one family of ours (without the prefix): labels -> value."""
        full = f"deepinfer:{name}"
        return {
            sample[len(full) :]: value
            for sample, value in self.samples.items()
            if sample == full or sample.startswith(full + "{")
        }

    def total(self, name: str) -> float:
        """Sum over all labels; 0.0 when the family has no sample."""
        return sum(self.each(name).values())

    def not_idle(self) -> list[str]:
        """What speaks against the idle invariant."""
        found = [f"{name}={self.each(name)}" for name in MUST_BE_ZERO if self.total(name) != 0]
        for pool in POOLS:
            free, cached = self.total(f"{pool}_free"), self.total(f"{pool}_cached")
            if (total := self.total(f"{pool}_total")) != free + cached:
                found.append(f"{pool}: free {free:g} + cached {cached:g} != total {total:g}")
        for name in ("requests_running", "requests_waiting", "frontend_live_requests", "tokenizer_live_requests"):
            if not self.each(name):
                found.append(f"{name} is not in /metrics")
        return found


class Service(Client):
    """`python launch.py` with flags, its folder, its log, and its processes.

    Everything that the launcher and its children write to stdout and stderr is in `log_path`.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        model: Path = TINY,
        engine: str = "mock",
        hooks: bool = True,
        env: dict[str, str] | None = None,
        key: str | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log_path, self.model_dir = folder, folder / "service.log", model
        self.model = "tiny"
        port_file = folder / "port"
        port_file.unlink(missing_ok=True)
        self.command = [sys.executable, "launch.py", "--engine", engine, "--model", str(model)]
        self.command += ["--served-model-name", self.model, "--port", "0", "--port-file", str(port_file)]
        self.command += [*(["--test-hooks"] if hooks else []), *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._port_file = port_file
        super().__init__("127.0.0.1", 0, key)

    def wait_ready(self, seconds: float = START_SECONDS) -> Service:
        """Until /health answers 200 {"status":"ok"}; fails with the log's end when the launcher ends before."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the launcher ended with {self.process.returncode}:\n{self.log()[-3000:]}")
            if not self.port and self._port_file.exists():
                self.port = int(self._port_file.read_text().strip() or 0)
            return bool(self.port) and self.healthy()

        try:
            poll("the service is ready", ready, seconds)
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"{error}\n{self.log()[-3000:]}") from None
        LIVE.append(self)
        return self

    def healthy(self) -> bool:
        try:
            answer = self.get("/health", timeout=5)
        except OSError:
            return False
        return answer.status == 200 and answer.json()["status"] == "ok"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # --- requests -------------------------------------------------------------------------------------------------

    def chat_body(self, content: str = "hello", hooks: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """A chat request's body; `hooks` become the metadata that test hooks read."""
        body: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": content}], **fields}
        if hooks:
            body["metadata"] = {**fields.get("metadata", {}), "deepinfer_hooks": hooks}
        return body

    def prompt_body(
        self, prompt: str | list[int] | list[Any], hooks: dict[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, **fields}
        if hooks:
            body["metadata"] = {**fields.get("metadata", {}), "deepinfer_hooks": hooks}
        return body

    def metrics(self) -> Metrics:
        answer = self.get("/metrics")
        assert answer.status == 200, answer.body
        return Metrics(answer.body.decode())

    def idle(self) -> None:
        """The idle invariant holds within its 2 s (with slack)."""
        last: list[str] = []

        def probe() -> bool:
            last[:] = self.metrics().not_idle()
            return not last

        try:
            poll("the idle invariant", probe, IDLE_SECONDS * SLACK)
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from None

    # --- processes ------------------------------------------------------------------------------------------------

    def children(self, role: str = "") -> list[psutil.Process]:
        """Live child processes, of one role or all, oldest first."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if child.status() != psutil.STATUS_ZOMBIE and role in ("", role_of(child)):
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return sorted(found, key=lambda child: child.create_time())

    def run_dir(self) -> Path:
        """The private folder with the internal sockets, found from what the router listens on."""
        paths = [
            Path(found.laddr)
            for child in self.children("router")
            for found in child.net_connections(kind="unix")
            if found.laddr and Path(found.laddr).name == "router.sock"
        ]
        assert paths, "the router listens on no router.sock"
        return paths[0].parent

    def stop(self) -> int:
        """SIGTERM, then SIGKILL; no process of it is left. Gives the launcher's exit code."""
        if self in LIVE:
            LIVE.remove(self)
        children = self.children() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
                kill_all(children)
                raise AssertionError(f"the launcher did not end after SIGTERM:\n{self.log()[-2000:]}") from None
        _, left = psutil.wait_procs(children, timeout=5)
        names = [f"{child.pid} {role_of(child)}" for child in left]
        kill_all(left)
        assert not left, f"left running: {names}"
        return int(self.process.returncode)


def role_of(process: psutil.Process) -> str:
    """The role of a child process by its command line; "" when it is not one of ours."""
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    return next((role for module, role in ROLES.items() if module in words), "")


def kill_all(processes: list[psutil.Process]) -> None:
    """SIGKILL to exactly these processes (by pid and start time)."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=5)


@contextmanager
def service(folder: Path, *flags: str, **options: Any) -> Iterator[Service]:
    """A ready service for the time of a with block; the idle invariant is checked at its end."""
    found = Service(folder, *flags, **options)
    try:
        found.wait_ready()
        yield found
        if found.process.poll() is None:
            found.idle()
    finally:
        found.stop()


def model_copy(folder: Path, source: Path = TINY, **changes: Any) -> Path:
    """A copy of a model folder with fields of its config.json changed."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps(config))
    return folder


def wait_gone(pid: int, seconds: float) -> float:
    """Until a process is gone (or a zombie); gives the seconds that took."""
    started = time.perf_counter()

    def gone() -> bool:
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    poll(f"process {pid} is gone", gone, seconds)
    return time.perf_counter() - started
