"""What an engine says before it is ready, and how it ends: in one line, at once, with nothing left.

44: a context length above the pool is refused with both numbers, the default is the lesser one. 50: a fault inside a
step ends the process within a second. Pools are sized by the memory that there is. A step that hangs ends the engine.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from engine_proc.assembly import Facts, context_length, describe, engine_info
from engine_proc.cache_spec import CacheSpec
from engine_proc.config import EngineConfig
from engine_proc.memory import available_bytes, cpu_blocks, cuda_blocks
from engine_proc.watchdog import Watchdog
from tests.pipeline.parts import Part
from tests.unit.engine_world import params
from tests.unit.loop_world import TINY
from wire.child import Control
from wire.link import Listener, Peer
from wire.messages import PROTOCOL_VERSION, Hello, Hook, Message, Submit, Welcome

MIB = 1 << 20


def config(**changes: Any) -> EngineConfig:
    return EngineConfig("/nowhere", b"s", 0, 1, "torch", "/nowhere", "cpu", "auto", **changes)


def facts(model: int = 8192) -> Facts:
    return Facts("d" * 64, CacheSpec(1, 128, (512,), "f"), 1000, model, [2], "fp32", "cpu")


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "pool", "found"), [(0, 1024, 1024), (0, 9000, 8192), (500, 1024, 500), (1024, 1024, 1024)]
)
def test_44_the_context_is_what_model_and_pool_allow(
    wanted: int, pool: int, found: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "deepinfer.engine"):
        assert context_length(config(context_length=wanted), facts(), pool) == found
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (not wanted)
    assert wanted or all(str(number) in lines[0] for number in (found, pool, 8192))


def test_44_an_explicit_context_that_is_too_long_names_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"--context-length 1500 .* 1024 tokens"):
        engine_info(config(context_length=1500), facts(), 8)
    with pytest.raises(ValueError, match=r"--context-length 9000 .* 8192 tokens"):
        engine_info(config(context_length=9000), facts(), 800)


def spec(mib: int) -> CacheSpec:
    return CacheSpec(2, 128, (mib * MIB // 2, mib * MIB // 2), "f")


@pytest.mark.parametrize(
    ("fields", "available_mib", "blocks"),
    [
        ({}, 4096, 512),  # a quarter of what is available
        ({"ranks": 4}, 4096, 128),  # for all ranks together
        ({"max_running": 1}, 1 << 20, 64),  # enough for all that can run
        ({"max_running": 2, "context_length": 1000}, 1 << 20, 16),
        ({"device_blocks": 77}, 4096, 77),
        ({"device_blocks": 2048}, 4096, 2048),
        ({}, 8, 1),
    ],
)
def test_blocks_on_the_cpu(fields: dict[str, Any], available_mib: int, blocks: int) -> None:
    wish = config(**{key: value for key, value in fields.items() if key != "ranks"})
    wish.ranks = fields.get("ranks", 1)
    assert cpu_blocks(wish, spec(2), 8192, available_mib * MIB) == blocks


def test_blocks_on_a_device() -> None:
    free, total = 60 << 30, 80 << 30
    assert cuda_blocks(config(max_running=4096), spec(2), 8192, free, total) == ((60 - 8 - 1) << 30) // (2 * MIB)
    assert cuda_blocks(config(device_blocks=5), spec(2), 8192, free, total) == 5
    with pytest.raises(ValueError, match="--device-blocks 50000 wants"):
        cuda_blocks(config(device_blocks=50_000), spec(2), 8192, free, total)
    with pytest.raises(ValueError, match="too little memory"):
        cuda_blocks(config(gpu_memory_fraction=0.3), spec(2), 8192, 50 << 30, 80 << 30)


def test_an_explicit_pool_is_counted_for_all_ranks() -> None:
    wish = config(device_blocks=1500)
    assert cpu_blocks(wish, spec(2), 8192, 4096 * MIB) == 1500
    wish.ranks = 2
    with pytest.raises(ValueError, match=r"--device-blocks 1500 wants 6,000.0 MiB for 2 ranks"):
        cpu_blocks(wish, spec(2), 8192, 4096 * MIB)


def test_too_little_memory_is_said_in_one_line() -> None:
    for fields, text in (({"device_blocks": 10}, "--device-blocks 10 wants 20.0 MiB"), ({}, "one block takes 2.0 MiB")):
        with pytest.raises(ValueError, match=text) as found:
            cpu_blocks(config(**fields), spec(2), 8192, 7 * MIB)
        assert "\n" not in str(found.value)


def test_memory_is_the_lesser_of_machine_and_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemFree: 3 kB\nMemAvailable:     500 kB\n")
    group = tmp_path / "group"
    group.mkdir()
    assert available_bytes(meminfo, group) == 500 * 1024
    (group / "memory.max").write_text("300000\n")
    (group / "memory.current").write_text("200000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    assert available_bytes(meminfo, group) == 150_000
    (group / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, group) == 500 * 1024
    (group / "memory").mkdir()
    (group / "memory" / "memory.limit_in_bytes").write_text("100")
    (group / "memory" / "memory.usage_in_bytes").write_text("120")
    assert available_bytes(meminfo, group) == 0
    with pytest.raises(ValueError, match="--device-blocks"):
        available_bytes(tmp_path / "none", tmp_path / "none")


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_fault_is_described_in_one_line() -> None:
    try:
        raise RuntimeError("first\nsecond " + "x" * 1000)
    except RuntimeError as error:
        text = describe(error)
    assert text.startswith("RuntimeError: first second xx")
    assert "test_engine_start.py line" in text
    assert "\n" not in text and len(text) < 600
    assert describe(KeyError("k")) == "KeyError: 'k'"


def test_the_watchdog_calls_once_for_a_step_that_does_not_end() -> None:
    late: list[float] = []
    called = threading.Event()

    def on_late(seconds: float) -> None:
        late.append(seconds)
        called.set()

    watchdog = Watchdog(0.1, on_late)
    watchdog.start()
    for _ in range(20):  # many short steps are no long one
        watchdog.since = time.monotonic()
        time.sleep(0.01)
    watchdog.since = 0.0
    assert not called.wait(0.15)
    watchdog.since = time.monotonic()
    assert called.wait(5)
    watchdog.join(5)
    assert len(late) == 1 and late[0] > 0.1


class EngineProcess:
    """A real mock engine process, and this test as its launcher and router."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        secret = secrets.token_bytes(16)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        welcome = Welcome(PROTOCOL_VERSION, "router", 7, 0, None)
        self.router = Listener(self.context, f"{folder}/router.sock", "router", 7, secret, lambda _: welcome)
        settings = EngineConfig(
            str(folder),
            secret,
            0,
            1,
            "mock",
            str(TINY),
            "cpu",
            "auto",
            test_hooks=True,
            **{"device_blocks": 64, **fields},
        )
        self.part = Part("engine_proc.mock_main", "engine", 0, settings, folder / "engine.log")
        self.inbox: list[Message] = []

    def until(self, done: Any, what: str, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"not in time: {what}: {self.part.log_path.read_text()[-1000:]}"
            self.router.socket.poll(20)
            self.inbox += [message for _, message, _ in self.router.drain(time.monotonic())]

    @property
    def peer(self) -> Peer:
        return self.router.by_name["engine.0"]

    def ready(self) -> EngineProcess:
        self.until(lambda: any(isinstance(item, Hello) and item.engine for item in self.inbox), "it is ready")
        return self

    def submit(self, **hooks: Any) -> None:
        wish = params(1000, hooks=hooks)
        assert self.router.send(self.peer, Submit(256, 0, 1, "", wish), np.array([5, 6], np.int32).tobytes(), b"", b"")

    def wait_end(self, seconds: float) -> tuple[int, str]:
        """→ exit code and the last error on its status pipe."""
        code = self.part.process.wait(seconds)
        text = b""
        while select.select([self.part._status], [], [], 0)[0] and (part := os.read(self.part._status, 65536)):
            text += part
        errors = [found["text"] for line in text.splitlines() if (found := json.loads(line))["what"] == "error"]
        return code, errors[-1] if errors else ""

    def close(self) -> None:
        if self.part.process.poll() is None:
            self.part.process.kill()
        self.part.process.wait(10)
        self.router.close()
        self.context.destroy(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dis") as name:
        yield Path(name)


def test_50_a_fault_inside_a_step_ends_the_process_in_one_line(folder: Path) -> None:
    engine = EngineProcess(folder).ready()
    try:
        engine.submit(fail_step=3)
        began = time.monotonic()
        code, error = engine.wait_end(10)
        assert code != 0
        assert time.monotonic() - began < 5  # at once on an idle machine
        assert "injected in step 3" in error
        assert "Traceback" not in engine.part.log_path.read_text()
    finally:
        engine.close()


def test_a_step_that_hangs_ends_the_process(folder: Path) -> None:
    engine = EngineProcess(folder, step_limit_seconds=0.5).ready()
    try:
        assert engine.router.send(engine.peer, Hook(1, 0, "hang", {"seconds": 60}))
        code, error = engine.wait_end(10)
        assert code != 0
        assert "--step-limit-seconds" in error
    finally:
        engine.close()


def test_a_bad_start_ends_in_one_line(folder: Path) -> None:
    engine = EngineProcess(folder, context_length=100_000)
    try:
        code, error = engine.wait_end(20)
        assert code != 0
        assert "--context-length 100000" in error and "8192" in error
    finally:
        engine.close()


def test_a_stop_ends_it_well_while_it_works(folder: Path) -> None:
    engine = EngineProcess(folder).ready()
    try:
        engine.submit()
        engine.part.control(Control("stop"))
        assert engine.wait_end(2.0 + 5)[0] == 0
    finally:
        engine.close()


def test_it_ends_with_its_launcher(folder: Path) -> None:
    engine = EngineProcess(folder).ready()
    try:
        engine.submit(step_ms=20)
        assert engine.part.process.stdin is not None
        engine.part.process.stdin.close()
        engine.wait_end(2.0 + 5)
    finally:
        engine.close()
