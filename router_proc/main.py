"""The router process: `python -m router_proc.main`, started by the launcher."""

from __future__ import annotations

import zmq

from router_proc.config import RouterConfig
from router_proc.service import TICK_SECONDS, Router
from wire.child import Child


def run(child: Child) -> None:
    """Until the launcher says stop."""
    config = child.config(RouterConfig)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = Router(config, child.generation, context)
    except (ValueError, zmq.ZMQError) as error:
        child.fail(f"cannot listen on {config.run_dir}/router.sock: {error}")
    router.watch(child.fileno())
    child.ready()
    while not child.stopping:
        router.turn(TICK_SECONDS)
        for control in child.controls():
            if control.what == "lost":
                router.lost(control)
    router.close()
    context.destroy(0)


if __name__ == "__main__":
    run(Child.start())
