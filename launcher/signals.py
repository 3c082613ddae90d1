"""Signals as a file descriptor: nothing is done inside a handler."""

from __future__ import annotations

import os
import signal
import socket

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """`fileno()` is readable while a signal waits. Made once, in the main thread."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._ends = 0
        for number in (*ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._read.fileno()

    def ends(self) -> int:
        """How often this process was asked to end since the last call."""
        self._take()
        found, self._ends = self._ends, 0
        return found

    def asked_to_end(self) -> bool:
        """Whether it was; the next `ends` still tells it."""
        self._take()
        return self._ends > 0

    def wake(self) -> None:
        """Make `fileno()` readable, from any thread."""
        os.write(self._write.fileno(), b"\0")

    def _take(self) -> None:
        try:
            numbers = self._read.recv(4096)
        except BlockingIOError:
            return
        self._ends += sum(number in ENDING for number in numbers)
