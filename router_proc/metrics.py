"""Merged numbers of all processes: counters outlive their process, gauges end with it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from wire.messages import Histogram, Stats

SAMPLE = re.compile(r'[a-z_][a-z0-9_]*(\{[a-z_][a-z0-9_]*="[^"\\\n]*"(,[a-z_][a-z0-9_]*="[^"\\\n]*")*\})?')
MAX_KNOWN_NAMES = 10_000
# Names of one process that the page shows under another: what only a frontend can measure or know.
SHOWN_AS = {
    "time_to_first_token_seconds": "ttft_seconds",
    "request_seconds": "e2e_seconds",
    "requests_aborted_total": 'requests_aborted_total{reason="client"}',
}


@dataclass
class Process:
    """The last numbers of one process start. `live`: it was not lost since."""

    identity: bytes
    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, Histogram]
    detail: dict[str, Any]
    live: bool = True


class Registry:
    """Takes `Stats`; gives sums over processes."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}  # by role.index
        self._counters: dict[str, float] = {}  # of former process starts
        self._histograms: dict[str, Histogram] = {}
        self._bounds: dict[str, list[float]] = {}
        self._names: set[str] = set()

    def put(self, name: str, identity: bytes, stats: Stats) -> bool:
        """Replace the numbers of a process. False for names or histograms that no page could show."""
        if not all(map(self._is_name, (*stats.counters, *stats.gauges, *stats.histograms))):
            return False
        if not all(map(math.isfinite, (*stats.counters.values(), *stats.gauges.values()))):
            return False
        histograms = {SHOWN_AS.get(key, key): value for key, value in stats.histograms.items()}
        for key, histogram in histograms.items():
            known = self._bounds.setdefault(key, histogram.bounds)
            if known != histogram.bounds or len(histogram.counts) != len(known) + 1:
                return False
        former = self.processes.get(name)
        if former is not None and former.identity != identity:
            self._fold(former)
        self.processes[name] = Process(
            identity,
            {SHOWN_AS.get(key, key): value for key, value in stats.counters.items()},
            stats.gauges,
            histograms,
            stats.detail,
        )
        return True

    def _is_name(self, name: str) -> bool:
        if name in self._names:
            return True
        if len(self._names) >= MAX_KNOWN_NAMES or not SAMPLE.fullmatch(name):
            return False
        self._names.add(name)
        return True

    def drop(self, identity: bytes) -> None:
        """A process is lost: its gauges mean nothing any more. (If it wakes, its next numbers go on from here.)"""
        for process in self.processes.values():
            if process.identity == identity:
                process.gauges, process.detail, process.live = {}, {}, False

    def _fold(self, process: Process) -> None:
        """A new start of the process follows: keep what the former one had counted."""
        _add(self._counters, process.counters)
        _add_histograms(self._histograms, process.histograms)

    def counters(self) -> dict[str, float]:
        """Sums over all processes and all their former starts."""
        found = dict(self._counters)
        for process in self.processes.values():
            _add(found, process.counters)
        return found

    def gauges(self) -> dict[str, float]:
        """Sums over all processes that live."""
        found: dict[str, float] = {}
        for process in self.processes.values():
            _add(found, process.gauges)
        return found

    def histograms(self) -> dict[str, Histogram]:
        found: dict[str, Histogram] = {}
        _add_histograms(found, self._histograms)
        for process in self.processes.values():
            _add_histograms(found, process.histograms)
        return found


def _add(sums: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0) + value


def _add_histograms(sums: dict[str, Histogram], values: dict[str, Histogram]) -> None:
    for name, value in values.items():
        old = sums.get(name)
        if old is None:
            sums[name] = Histogram(value.bounds, list(value.counts), value.total)
        else:
            old.counts = [a + b for a, b in zip(old.counts, value.counts, strict=True)]
            old.total += value.total
