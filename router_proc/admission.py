"""Admission: how many sequences and prompt tokens may wait, by counters. The router holds no queue of its own."""

from __future__ import annotations

import math

MAX_RETRY_SECONDS = 60
MEAN_OVER = 64  # sequences that the mean running time looks back on


class Admission:
    """Places for sequences: what the ready ranks can run, plus `max_queued_requests` that may wait.

    `max_queued_tokens` (0 = unlimited) bounds the prompt tokens of sequences that have produced nothing yet; a
    request that finds none of those waiting is always let in, however long it is.
    """

    def __init__(self, max_queued_requests: int, max_queued_tokens: int) -> None:
        self._max_requests, self._max_tokens = max_queued_requests, max_queued_tokens
        self.running_places = 0  # sum of max_running over the ready ranks
        self.taken = 0
        self.queued_tokens = 0
        self._ended, self._mean_seconds = 0, 0.0

    def has_room(self, n: int, prompt_tokens: int) -> bool:
        """Whether `n` sequences of a prompt fit."""
        if self.taken + n > self.running_places + self._max_requests:
            return False
        tokens = self.queued_tokens + n * prompt_tokens
        return not self._max_tokens or not self.queued_tokens or tokens <= self._max_tokens

    def take(self, n: int, prompt_tokens: int) -> None:
        self.taken += n
        self.queued_tokens += n * prompt_tokens

    def started(self, prompt_tokens: int) -> None:
        """A sequence has produced its first id."""
        self.queued_tokens -= prompt_tokens

    def release(self, prompt_tokens: int, seconds: float) -> None:
        """A sequence gives its place back. `prompt_tokens`: 0 if it had started; `seconds`: how long it ran, then."""
        self.taken -= 1
        self.queued_tokens -= prompt_tokens
        if seconds > 0:
            self._ended += 1
            self._mean_seconds += (seconds - self._mean_seconds) / min(self._ended, MEAN_OVER)

    def retry_after(self, n: int) -> int:
        """Estimated waiting time of `n` more sequences (whole seconds, 1..60): the queue at the mean pace."""
        waiting = max(1, self.taken + n - self.running_places)
        seconds = self._mean_seconds * waiting / max(1, self.running_places)
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(seconds)))

    def check(self) -> None:
        """With no sequence anywhere: raises AssertionError when a counter is not zero."""
        assert self.taken == 0, f"{self.taken} places are taken and no sequence is there"
        assert self.queued_tokens == 0, f"{self.queued_tokens} tokens are queued and no sequence is there"
