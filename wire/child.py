"""The frame of a child process: configuration in, status out, and an end that cannot be missed.

The launcher writes one JSON envelope line to the child's stdin and keeps that pipe open. Later lines are controls;
end of file means that the launcher is gone. Together with the parent-death signal this ends the child within
`HARD_EXIT_SECONDS` whatever its main thread is doing. The child tells phases, readiness and its last error over a
pipe of its own (`status_fd`) as JSON lines. Logs go to stderr, one line each, without prompts or secrets.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import secrets
import shutil
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import msgspec

HARD_EXIT_SECONDS = 2.0
PR_SET_PDEATHSIG = 1
CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(32), 127)}

T = TypeVar("T")
log = logging.getLogger("deepinfer.child")


class Envelope(msgspec.Struct):
    """First line on stdin."""

    role: str
    index: int
    generation: int
    launcher_pid: int
    status_fd: int
    log_level: str
    config: msgspec.Raw
    run_dir: str = ""  # the launcher's private folder, removed by its children when it was killed


class Control(msgspec.Struct, omit_defaults=True):
    """A later line on stdin. `what`: "drain" (seconds), "stop", "lost" (role, index, generation of a dead child)."""

    what: str
    seconds: float = 0.0
    role: str = ""
    index: int = -1
    generation: int = 0


class Status(msgspec.Struct, omit_defaults=True):
    """A line on the status pipe. `what`: "phase" (name, done, total), "ready" (info), "error" (text)."""

    what: str
    name: str = ""
    done: int = 0
    total: int = 0
    text: str = ""
    info: dict[str, Any] = {}


class OneLine(logging.Formatter):
    """Single-line records: control characters are escaped, so that no id or message can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(CONTROL_CHARACTERS)


def set_up_logging(name: str, level: str) -> None:
    """Log to stderr as `time level process logger: message`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(f"%(asctime)s %(levelname).1s {name} %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def remove_run_dir(path: str) -> None:
    """For the children of a launcher that was killed: each one tries, and the next start sweeps what is left."""
    if path:
        shutil.rmtree(path, ignore_errors=True)


def new_generation() -> int:
    """A random id of one process start: 63 bits, never 0."""
    return secrets.randbits(63) | 1


class Child:
    """One per process, made first thing in `main`. `fileno()` is readable while `controls()` has something."""

    def __init__(self, envelope: Envelope, stdin_fd: int) -> None:
        self.role, self.index, self.generation = envelope.role, envelope.index, envelope.generation
        self.name = f"{envelope.role}.{envelope.index}"
        self._launcher, self._config, self._run_dir = envelope.launcher_pid, envelope.config, envelope.run_dir
        self._status = os.fdopen(envelope.status_fd, "wb", buffering=0)
        self._queue: queue.SimpleQueue[Control] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.stopping = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        set_up_logging(self.name, envelope.log_level)
        sys.excepthook = self._uncaught
        threading.Thread(target=self._watch, args=(stdin_fd,), name="launcher-watch", daemon=True).start()

    @classmethod
    def start(cls) -> Child:
        """Read the envelope and take the frame's place in this process."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        line = bytearray()
        while not line.endswith(b"\n"):
            if not (byte := os.read(0, 1)):
                sys.exit(1)
            line += byte
        envelope = msgspec.json.decode(bytes(line), type=Envelope)
        if os.getppid() != envelope.launcher_pid:
            remove_run_dir(envelope.run_dir)
            sys.exit(1)
        return cls(envelope, 0)

    def config(self, kind: type[T]) -> T:
        """The process's configuration, as the struct `kind`."""
        return msgspec.json.decode(self._config, type=kind)

    def fileno(self) -> int:
        return self._wake_read

    def controls(self) -> list[Control]:
        """What the launcher said since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        found = []
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        return found

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Tell the launcher what is being done and how far it is (bytes or steps)."""
        self._tell(Status("phase", name=name, done=done, total=total))

    def ready(self, **info: Any) -> None:
        """Tell the launcher that this process can work."""
        self._tell(Status("ready", info=info))

    def fail(self, text: str) -> NoReturn:
        """Tell the launcher the reason in one line and end with a non-zero code."""
        self._tell(Status("error", text=text.translate(CONTROL_CHARACTERS)))
        sys.exit(1)

    def _tell(self, status: Status) -> None:
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone: the watcher ends this process
            self._status.write(msgspec.json.encode(status) + b"\n")

    def _uncaught(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        self._tell(Status("error", text=f"{kind.__name__}: {value}".translate(CONTROL_CHARACTERS)))
        sys.__excepthook__(kind, value, traceback)

    def _on_sigterm(self, *_: object) -> None:
        # A SIGTERM to the whole process group is the launcher's to handle (it drains); without it, leave.
        if os.getppid() != self._launcher:
            self._orphaned()

    def _orphaned(self) -> None:
        """The launcher was killed: nobody else removes its folder of sockets."""
        remove_run_dir(self._run_dir)
        self._stop()

    def _put(self, control: Control) -> None:
        self._queue.put(control)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        self._put(Control("stop"))
        threading.Thread(target=self._hard_exit, daemon=True).start()

    def _hard_exit(self) -> None:
        time.sleep(HARD_EXIT_SECONDS)
        os._exit(1)

    def _watch(self, fd: int) -> None:
        rest, told = b"", False
        while chunk := os.read(fd, 65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                control = msgspec.json.decode(line, type=Control)
                if control.what == "stop":
                    told = True
                    self._stop()
                else:
                    self._put(control)
        if not told:
            self._orphaned()
