"""Asks the service's own /health, from a thread, until it can do work."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable

PAUSE_SECONDS = 0.03
TIMEOUT_SECONDS = 2.0


class Probe(threading.Thread):
    """`healthy` turns true once, then `tell` is called (in this thread). `last` is the last answer, in words."""

    def __init__(self, address: str, port: int, tell: Callable[[], None]) -> None:
        super().__init__(name="health-probe", daemon=True)
        self._address, self._port, self._tell = address, port, tell
        self._ending = threading.Event()
        self.healthy = False
        self.last = "no answer"

    def run(self) -> None:
        while not self._ending.wait(PAUSE_SECONDS):
            connection = http.client.HTTPConnection(self._address, self._port, timeout=TIMEOUT_SECONDS)
            try:
                connection.request("GET", "/health", headers={"Connection": "close"})
                answer = connection.getresponse()
                self.last = f"{answer.status} {answer.read(4096).decode(errors='replace')}"
                self.healthy = answer.status == 200
            except (OSError, http.client.HTTPException) as error:
                self.last = str(error) or type(error).__name__
            finally:
                connection.close()
            if self.healthy:
                self._tell()
                return

    def stop(self) -> None:
        self._ending.set()
