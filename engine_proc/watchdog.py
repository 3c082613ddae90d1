"""Ends an engine whose step does not end: a frozen device must not hold its sequences for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

CHECKS = 10  # per limit


class Watchdog(threading.Thread):
    """`on_late(seconds)` is called in this thread, once, when a step takes longer than the limit."""

    def __init__(self, limit: float, on_late: Callable[[float], None]) -> None:
        super().__init__(name="step-watchdog", daemon=True)
        self._limit, self._on_late = limit, on_late
        self._ending = threading.Event()
        self.since = 0.0  # when the step under way began (monotonic seconds), 0.0 = none; set by the loop

    def run(self) -> None:
        while not self._ending.wait(min(1.0, self._limit / CHECKS)):
            since = self.since
            if since and (late := time.monotonic() - since) > self._limit:
                self._on_late(late)
                return

    def stop(self) -> None:
        self._ending.set()
        self.join()
