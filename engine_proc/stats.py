"""Numbers of one engine, in the form in which the router merges them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict
from typing import Any

from engine_proc.scheduler import Scheduler
from wire.link import LinkCounters
from wire.messages import Histogram, Stats

QUEUE_BOUNDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0]


class EngineStats:
    """Absolute since the process started. What only the loop knows is in its fields."""

    def __init__(self, name: str, scheduler: Scheduler, link: LinkCounters) -> None:
        self._name, self._scheduler, self._link = name, scheduler, link
        self.steps = 0
        self.step_seconds = 0.0  # from launch to result, summed
        self.bad_requests = 0
        self.late_aborts = 0
        self._queue_counts = [0] * (len(QUEUE_BOUNDS) + 1)
        self._queue_total = 0.0

    def started(self, waited: float) -> None:
        """A sequence has got its slot after so many seconds in the queue."""
        self._queue_counts[bisect_left(QUEUE_BOUNDS, waited)] += 1
        self._queue_total += waited

    def message(self) -> Stats:
        scheduler, pool = self._scheduler, self._scheduler.pool.counts()
        prefix, done = scheduler.prefix.counters, scheduler.counters
        gauges = {
            "requests_running": scheduler.running,
            "requests_waiting": scheduler.waiting,
            "gpu_pages_total": pool.total,
            "gpu_pages_free": pool.free,
            "gpu_pages_cached": pool.cached,
            "gpu_pages_pinned": pool.pinned,
            **dict.fromkeys(("swa_slots_total", "swa_slots_free", "swa_slots_cached"), 0),
            **dict.fromkeys(("host_pages_total", "host_pages_free", "host_pages_cached", "host_pages_pinned"), 0),
        }
        counters = {
            "prefix_tokens_queried_total": prefix.queried_tokens,
            "prefix_tokens_reused_total": prefix.reused_tokens,
            "prefix_key_collisions_total": prefix.collisions,
            "preemptions_total": done.preemptions,
            f'ipc_bad_messages_total{{process="{self._name}"}}': self._link.bad_messages + self.bad_requests,
            f'ipc_gaps_total{{process="{self._name}"}}': self._link.gaps,
        }
        return Stats(
            counters={name: float(value) for name, value in counters.items()},
            gauges={name: float(value) for name, value in gauges.items()},
            histograms={"queue_seconds": Histogram(QUEUE_BOUNDS, self._queue_counts.copy(), self._queue_total)},
            detail=self._detail(),
        )

    def _detail(self) -> dict[str, Any]:
        """For /deepinfer/metrics alone."""
        scheduler = self._scheduler
        pool = scheduler.pool.counts()
        return {
            "steps": self.steps,
            "step_seconds": round(self.step_seconds, 6),
            "blocks_fenced": pool.fenced,
            "block_evictions": scheduler.pool.evictions,
            "token_usage": round(pool.pinned / pool.total, 6),
            "stale_link_messages": self._link.stale,
            "send_failures": self._link.send_failures,
            "late_aborts": self.late_aborts,
            "scheduler": asdict(scheduler.counters),
        }
