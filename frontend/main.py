"""The frontend process: HTTP on the launcher's socket, links to tokenizers and router, drain and end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
import uvloop

from frontend.app import App
from frontend.config import FrontendConfig
from frontend.http import StrictProtocol
from frontend.hub import Hub
from frontend.metrics import Metrics
from wire.child import Child, Control

IDLE_POLL_SECONDS = 0.02
FLUSH_SECONDS = 1.0
LINK_SECONDS = 2.0
BACKLOG = 2048

log = logging.getLogger("deepinfer.frontend")


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: this process is ended by its launcher."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: App, config: FrontendConfig, metrics: Metrics) -> Server:
    """uvicorn with our HTTP protocol, no access log and no server header."""
    protocol = functools.partial(
        StrictProtocol,
        head_seconds=config.header_timeout_seconds,
        stall_seconds=config.send_stall_seconds,
        count=metrics.count,
    )
    settings = uvicorn.Config(
        cast(Any, app),
        http=cast(Any, protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=cast(int, config.keepalive_seconds),
        timeout_graceful_shutdown=1,
        backlog=BACKLOG,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return Server(settings)


class Frontend:
    """All parts of the process, and what the launcher's controls do to them."""

    def __init__(self, config: FrontendConfig, index: int, generation: int) -> None:
        self.metrics = Metrics()
        self.hub = Hub(config, index, generation, self.metrics)
        self.app = App(config, self.hub, self.metrics)
        self.server = make_server(self.app, config, self.metrics)
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Until a drain has ended or `stop` was called."""
        try:
            await self.server.serve(sockets=[listener])
        finally:
            self.hub.close()

    async def linked(self) -> None:
        """Until HTTP is served and every link is up for the first time."""
        while not (self.server.started and self.hub.router.up and all(link.up for link in self.hub.tokenizers)):
            await asyncio.sleep(IDLE_POLL_SECONDS)

    def control(self, control: Control) -> None:
        if control.what == "drain":
            self.app.draining = True
            if self._draining is None:
                self._draining = asyncio.get_running_loop().create_task(self._drain(control.seconds))
        elif control.what == "stop":
            self.stop()
        elif control.what == "lost":
            self.hub.lost(control)

    def stop(self) -> None:
        """End now: what is still live gets its in-band error."""
        self.app.draining = True
        self.hub.shut_down()
        self.server.should_exit = True

    async def _drain(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle()
        self.hub.shut_down()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._idle()
        self.server.should_exit = True

    async def _idle(self) -> None:
        while self.app.active:
            await asyncio.sleep(IDLE_POLL_SECONDS)


async def run(child: Child) -> None:
    """The life of the process."""
    config = child.config(FrontendConfig)
    frontend = Frontend(config, child.index, child.generation)
    loop = asyncio.get_running_loop()

    def on_controls() -> None:
        for control in child.controls():
            frontend.control(control)

    loop.add_reader(child.fileno(), on_controls)
    serving = loop.create_task(frontend.serve(socket.socket(fileno=config.listen_fd)))
    linked = loop.create_task(frontend.linked())
    ends: list[asyncio.Future[Any]] = [serving, frontend.hub.refused]
    # Links need milliseconds. A service whose other processes are late is served all the same, with 503.
    await asyncio.wait([*ends, linked], timeout=LINK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    if frontend.server.started:
        child.ready()
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    linked.cancel()
    if frontend.hub.refused.done():
        child.fail(frontend.hub.refused.result())
    await serving


def main() -> None:
    child = Child.start()
    try:
        uvloop.run(run(child))
    except OSError as error:
        child.fail(f"the frontend cannot serve: {error}")


if __name__ == "__main__":
    main()
