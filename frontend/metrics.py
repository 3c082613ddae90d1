"""Numbers of one frontend process, in the form in which the router merges them."""

from __future__ import annotations

from bisect import bisect_left

from wire.messages import Histogram, Stats

FIRST_TOKEN_BOUNDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0]
INTER_TOKEN_BOUNDS = [0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0]
REQUEST_BOUNDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1800.0]


class Buckets:
    """A histogram under way; values are seconds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: list[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count `times` values of `seconds` each."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def snapshot(self) -> Histogram:
        return Histogram(self.bounds, self.counts.copy(), self.total)


class Metrics:
    """Absolute since the process started."""

    def __init__(self) -> None:
        self.first_token = Buckets(FIRST_TOKEN_BOUNDS)
        self.inter_token = Buckets(INTER_TOKEN_BOUNDS)
        self.request = Buckets(REQUEST_BOUNDS)
        self.by_status: dict[int, int] = {}
        self.aborted = 0  # requests whose client left before their end
        self.stalled = 0  # streams ended because their reader did not read
        self.late = 0  # deltas for requests that have ended here
        self.live = 0

    def count(self, status: int) -> None:
        """One HTTP answer."""
        self.by_status[status] = self.by_status.get(status, 0) + 1

    def stats(self, process: str, bad_messages: int, gaps: int) -> Stats:
        """`bad_messages` and `gaps` are sums over this process's links."""
        counters: dict[str, float] = {
            f'http_requests_total{{status="{status}"}}': count for status, count in sorted(self.by_status.items())
        }
        counters["requests_aborted_total"] = self.aborted
        counters["streams_stalled_total"] = self.stalled
        counters["late_outputs_total"] = self.late
        counters[f'ipc_bad_messages_total{{process="{process}"}}'] = bad_messages
        counters[f'ipc_gaps_total{{process="{process}"}}'] = gaps
        return Stats(
            counters=counters,
            gauges={"frontend_live_requests": self.live},
            histograms={
                "time_to_first_token_seconds": self.first_token.snapshot(),
                "inter_token_seconds": self.inter_token.snapshot(),
                "request_seconds": self.request.snapshot(),
            },
        )
