"""Starts the processes, watches them, starts dead ones again, drains and ends them. One loop, nothing waits in it."""

from __future__ import annotations

import enum
import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from launcher.children import ChildSpec
from launcher.console import Console
from launcher.process import ChildProcess
from launcher.signals import Signals
from wire.child import Control, Status

MOST_FAILURES = 3  # deaths of one child in a row before it was ready
STOP_SECONDS = 2.4  # a child ends itself within 2 s (wire.child.HARD_EXIT_SECONDS)
DRAIN_SLACK_SECONDS = 3.0  # a frontend may write its last errors for this long after the drain
GIVE_UP_SECONDS = 5.0  # for a killed process to be gone
TICK_SECONDS = 0.5


class State(enum.Enum):
    """starting → serving → draining → stopping; from each one straight to stopping."""

    STARTING = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()
    STOPPING = enum.auto()


class HealthProbe(Protocol):
    """What the supervisor asks when all processes say that they are ready."""

    healthy: bool
    last: str

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Slot:
    """The place of one process of the service; the process in it changes when it is started again."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: ChildProcess | None = None
        self.failures = 0


class Supervisor:
    """`run()` gives the exit code when no child is left."""

    def __init__(
        self,
        specs: list[ChildSpec],
        run_dir: Path,
        console: Console,
        signals: Signals,
        probe: HealthProbe,
        log_level: str = "info",
        start_seconds: float = 600.0,
        drain_seconds: float = 30.0,
        on_serving: Callable[[], None] = lambda: None,
        on_ending: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_serving` is called once, when the service can do work; `on_ending` when no new connection is wanted."""
        self.slots = [Slot(spec) for spec in specs]
        self.state = State.STARTING
        self._run_dir, self._console, self._signals, self._probe = run_dir, console, signals, probe
        self._log_level, self._start_seconds, self._drain_seconds = log_level, start_seconds, drain_seconds
        self._on_serving, self._on_ending = on_serving, on_ending
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._code = 0
        self._asked = 0
        self._probing = False
        self._began = time.monotonic()
        self._deadline = 0.0  # of the drain or the stop
        self._killed = False

    def run(self) -> int:
        """Until the service has ended. Nothing of it is left then, also when this raises."""
        try:
            for slot in self.slots:
                if self.state is State.STARTING:
                    self._start(slot)
            while self.state is not State.STOPPING or self._alive():
                self._turn()
        finally:
            self._probe.stop()
            self._end_all()
            self._selector.close()
        return self._code

    def _turn(self) -> None:
        for key, events in self._selector.select(self._patience()):
            if isinstance(key.data, Slot):
                self._serve(key.data, key.fd, events)
        for _ in range(self._signals.ends()):
            self._asked_to_end()
        for slot in self.slots:
            if slot.process is not None and slot.process.ended():
                self._died(slot, slot.process)
        self._check_time(time.monotonic())
        self._check_ready()

    def _patience(self) -> float:
        wanted = [TICK_SECONDS]
        if self._deadline:
            wanted.append(self._deadline - time.monotonic())
        return max(0.0, min(wanted))

    def _alive(self, role: str = "") -> list[ChildProcess]:
        return [slot.process for slot in self.slots if slot.process and role in ("", slot.spec.role)]

    # --- one child ------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        try:
            process = ChildProcess(slot.spec, self._run_dir, self._log_level)
        except OSError as error:
            self._fail(f"{slot.spec.name} cannot be started: {error}")
            return
        slot.process = process
        self._selector.register(process.status_fd, selectors.EVENT_READ, slot)
        self._tell(slot, None)

    def _tell(self, slot: Slot, control: Control | None) -> None:
        """Send a control; what its pipe does not take now goes out when it does."""
        process = slot.process
        if process is None:
            return
        if control is not None:
            process.tell(control)
        if process.flush() and process.stdin_fd not in self._selector.get_map():
            self._selector.register(process.stdin_fd, selectors.EVENT_WRITE, slot)

    def _serve(self, slot: Slot, fd: int, events: int) -> None:
        process = slot.process
        if process is None:
            return
        if events & selectors.EVENT_WRITE:
            if fd == process.stdin_fd and not process.flush():
                self._selector.unregister(fd)
            return
        before = process.ready
        for status in process.statuses():
            self._take(slot, process, status)
        if process.silent:
            self._selector.unregister(process.status_fd)
        if process.ready and not before:
            slot.failures = 0
            if self.state is State.SERVING:
                self._console.line(f"{process.name} is ready again")

    def _take(self, slot: Slot, process: ChildProcess, status: Status) -> None:
        if status.what == "ready":
            process.ready = True
        elif status.what == "error":
            process.error = status.text
        elif status.what == "phase" and self.state is State.STARTING:
            several = sum(other.spec.role == slot.spec.role for other in self.slots) > 1
            if not several or slot.spec.index == 0:
                self._console.phase(
                    f"{slot.spec.role}{'s' if several else ''}: {status.name}", status.done, status.total
                )

    def _died(self, slot: Slot, process: ChildProcess) -> None:
        for status in process.statuses():
            self._take(slot, process, status)
        for fd in (process.status_fd, process.stdin_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        process.close()
        slot.process = None
        lost = Control("lost", role=slot.spec.role, index=slot.spec.index, generation=process.generation)
        for other in self.slots:
            self._tell(other, lost)
        if self.state is State.STARTING:
            self._fail(f"{process.name} failed to start: {process.how_it_ended()}")
        elif self.state is State.SERVING:
            self._start_again(slot, process)
        elif self.state is State.DRAINING and not self._alive("frontend"):
            self._stop()

    def _start_again(self, slot: Slot, process: ChildProcess) -> None:
        if not process.ready:
            slot.failures += 1
        if slot.failures >= MOST_FAILURES:
            times = f"{slot.failures} times in a row before it was ready"
            self._fail(f"{process.name} died {times}: {process.how_it_ended()}")
            return
        self._console.error(f"{process.name} (pid {process.pid}) died: {process.how_it_ended()}; starting it again")
        self._start(slot)

    # --- the service ----------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self.state is not State.STARTING:
            return
        if not self._probing and all(slot.process and slot.process.ready for slot in self.slots):
            self._probing = True
            self._probe.start()
        if self._probe.healthy:
            self.state = State.SERVING
            self._on_serving()

    def _check_time(self, now: float) -> None:
        if self.state in (State.STARTING, State.SERVING):
            for slot in self.slots:
                process = slot.process
                if process and not process.ready and now - process.started > self._start_seconds:
                    process.error = f"it was not ready after {self._start_seconds:g} s (--start-timeout-seconds)"
                    process.kill()
            if self._probing and self.state is State.STARTING and now - self._began > self._start_seconds:
                self._fail(f"the service did not become healthy (--start-timeout-seconds): {self._probe.last}")
        elif self._deadline and now > self._deadline:
            if self.state is State.DRAINING:
                self._stop()
            else:
                self._kill(now)

    def _asked_to_end(self) -> None:
        self._asked += 1
        if self.state is State.SERVING:
            self._console.line(f"draining for at most {self._drain_seconds:g} s; a second signal ends at once")
            self.state = State.DRAINING
            self._deadline = time.monotonic() + self._drain_seconds + DRAIN_SLACK_SECONDS
            self._on_ending()
            for slot in self.slots:
                if slot.spec.role == "frontend":
                    self._tell(slot, Control("drain", seconds=self._drain_seconds))
            if not self._alive("frontend"):
                self._stop()
        elif self.state in (State.STARTING, State.DRAINING):
            self._stop()
        elif self._asked > 2:
            self._kill(time.monotonic())

    def _fail(self, text: str) -> None:
        """End the service with a non-zero code. The first reason is the one that counts."""
        if self.state is not State.STOPPING:
            self._console.error(text)
            self._code = 1
            self._stop()

    def _stop(self) -> None:
        self.state = State.STOPPING
        self._deadline = time.monotonic() + STOP_SECONDS
        self._on_ending()
        for slot in self.slots:
            self._tell(slot, Control("stop"))

    def _kill(self, now: float) -> None:
        for process in self._alive():
            process.kill()
        if self._killed and now > self._deadline:
            names = ", ".join(f"{process.name} (pid {process.pid})" for process in self._alive())
            raise RuntimeError(f"killed, but still there: {names}")
        if not self._killed:
            self._killed, self._deadline = True, now + GIVE_UP_SECONDS

    def _end_all(self) -> None:
        """For the way out by an exception: no child outlives the loop."""
        left = self._alive()
        for process in left:
            process.kill()
        for process in left:
            process.wait(GIVE_UP_SECONDS)
