"""One running child: its two pipes, what it told, and how it ended. Nothing here waits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from launcher.children import ChildSpec
from wire.child import Control, Envelope, Status, new_generation

ROOT = Path(__file__).resolve().parents[1]
MOST_STATUS_BYTES = 1 << 20  # of one line


class ChildProcess:
    """From its start to its end. `status_fd` is readable while it has told something or has ended."""

    def __init__(self, spec: ChildSpec, run_dir: Path, log_level: str) -> None:
        """Start it. OSError when the system has no process or descriptor left."""
        self.spec, self.generation = spec, new_generation()
        self.started = time.monotonic()
        self.ready = False
        self.error = ""  # what it said before it failed
        self.silent = False  # its status pipe is closed: it is about to end
        self._rest = b""
        self.status_fd, status_write = os.pipe()
        stdin_read, self.stdin_fd = os.pipe()
        os.set_blocking(self.status_fd, False)
        os.set_blocking(self.stdin_fd, False)
        raw = msgspec.Raw(spec.config)
        envelope = Envelope(
            spec.role, spec.index, self.generation, os.getpid(), status_write, log_level, raw, str(run_dir)
        )
        # The envelope is in the pipe before the child exists: if this process is killed, the child can clean up.
        self._outbox = bytearray(msgspec.json.encode(envelope) + b"\n")
        self.flush()
        # Ctrl-C in a terminal reaches the whole process group; ending is the launcher's decision alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", spec.module],
                cwd=ROOT,
                env={**os.environ, **spec.environment},
                stdin=stdin_read,
                stdout=2,
                pass_fds=(status_write, *spec.fds),
            )
        except OSError:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(status_write)
            os.close(stdin_read)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return self.spec.name

    # --- to the child ---------------------------------------------------------------------------------------------

    def tell(self, control: Control) -> None:
        self._outbox += msgspec.json.encode(control) + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Write what the pipe takes; True while something is left."""
        try:
            while self._outbox:
                del self._outbox[: os.write(self.stdin_fd, self._outbox)]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self._outbox.clear()  # it has ended: its status pipe and its exit code tell the rest
        return False

    def kill(self) -> None:
        self._process.kill()

    # --- from the child -------------------------------------------------------------------------------------------

    def statuses(self) -> list[Status]:
        """What it told since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.status_fd, 65536):
                self._rest += chunk
            self.silent = True
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > MOST_STATUS_BYTES:
            self._rest = b""
        for line in lines:
            try:
                found.append(msgspec.json.decode(line, type=Status))
            except msgspec.MsgspecError:
                found.append(Status("error", text="it wrote a status line that does not decode"))
        return found

    def ended(self) -> bool:
        """Whether it has ended; it is reaped then."""
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        """One line: its last error, else its exit code or signal."""
        code = self._process.returncode
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"it ended with exit code {code} and no word"
        return self.error or how

    def wait(self, seconds: float) -> None:
        """For the end of a killed process. subprocess.TimeoutExpired when it does not come."""
        self._process.wait(seconds)

    def close(self) -> None:
        """Give its pipes back."""
        os.close(self.status_fd)
        os.close(self.stdin_fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
