"""Threads that prepare large requests, so that the loop goes on with everybody else's text."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

from api.errors import ApiError, failure
from tokenizer_proc.prepare import Prepared
from tokenizer_proc.requests import Request
from wire.messages import Generate, ServiceInfo

THREADS = 2

log = logging.getLogger("deepinfer.tokenizer")

Prepare = Callable[[Generate, bytes, ServiceInfo], Prepared]
Outcome = Prepared | ApiError


def outcome_of(prepare: Prepare, generate: Generate, body: bytes, service: ServiceInfo) -> Outcome:
    """The prepared request, or the error that its client gets: a fault of ours ends this request only."""
    try:
        return prepare(generate, body, service)
    except ApiError as error:
        return error
    except Exception as error:  # noqa: BLE001 - answered as internal_error and logged, without the request's text
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None:
            frames = frames.tb_next
        place = "" if frames is None else f"{frames.tb_frame.f_code.co_name}:{frames.tb_lineno}"
        log.error("preparing a request failed: %s in %s", type(error).__name__, place)
        return failure("internal_error")


class Workers:
    """`fileno()` is readable while `outcomes()` has something."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._jobs: queue.SimpleQueue[tuple[Request, Generate, bytes, ServiceInfo] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Request, Outcome]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [threading.Thread(target=self._run, name=f"encode-{i}", daemon=True) for i in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        return self._wake

    def submit(self, request: Request, generate: Generate, body: bytes, service: ServiceInfo) -> None:
        self._jobs.put((request, generate, body, service))

    def outcomes(self) -> list[tuple[Request, Outcome]]:
        """What was finished since the last call."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        found = []
        while not self._done.empty():
            found.append(self._done.get_nowait())
        return found

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            request, generate, body, service = job
            if request.gone:
                continue
            self._done.put((request, outcome_of(self._prepare, generate, body, service)))
            os.eventfd_write(self._wake, 1)
