"""What the launcher shows: one line per phase, and on a terminal a bar that moves."""

from __future__ import annotations

import contextlib
import sys
import time

WIDTH = 30
REDRAW_SECONDS = 0.1
BYTES_FROM = 1 << 16  # totals from here on are shown in megabytes


class Console:
    """Lines on stdout, errors on stderr. A reader that has gone does not end the service."""

    def __init__(self) -> None:
        self._bars = sys.stdout.isatty()
        self._phases: set[str] = set()
        self._drawn = 0.0
        self._bar_open = False

    def line(self, text: str) -> None:
        self._write(f"deepinfer: {text}\n")

    def error(self, text: str) -> None:
        self._close_bar()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"deepinfer: {text}\n")
            sys.stderr.flush()

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Tell how far a phase is; off a terminal only its first mention is a line."""
        first = name not in self._phases
        self._phases.add(name)
        if not self._bars or (first and not total and not done):
            if first:
                self.line(f"{name} ...")
            return
        now = time.monotonic()
        finished = 0 < total <= done
        if not first and not finished and now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        self._draw(f"\r\033[Kdeepinfer: {name} {_progress(done, total)}")
        self._bar_open = True
        if finished:
            self._close_bar()

    def _close_bar(self) -> None:
        if self._bar_open:
            self._bar_open = False
            self._draw("\n")

    def _write(self, text: str) -> None:
        self._close_bar()
        self._draw(text)

    def _draw(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write(text)
            sys.stdout.flush()


def _progress(done: int, total: int) -> str:
    megabytes = max(done, total) >= BYTES_FROM
    shown = f"{done / 1e6:.1f}" if megabytes else str(done)
    if not total:
        return f"{shown} MB" if megabytes else shown
    filled = WIDTH * min(done, total) // total
    whole = f"{total / 1e6:.1f} MB" if megabytes else str(total)
    return f"[{'#' * filled}{' ' * (WIDTH - filled)}] {shown} of {whole}"
