"""The two generate routes: check, send on, wait until accepted, answer; abort when the client goes."""

from __future__ import annotations

import asyncio
import secrets
import time

from api import adopt, parse
from api.errors import failure
from frontend.exchange import Exchange
from frontend.hub import Hub
from frontend.live import LiveRequest
from frontend.responses import whole_answer
from frontend.streams import ChunkForm, Headers, stream_answer
from wire.messages import Accepted, Generate, Sampling, Shape

PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-"}


async def generate(route: str, exchange: Exchange, hub: Hub) -> None:
    """Answer a POST to "chat" or "completions". Raises ApiError while nothing has been sent."""
    exchange.require_json()
    timeout = exchange.deadline()
    body = await exchange.body()
    live = _submit(route, body, exchange, hub, timeout)
    live.cut = exchange.connection.cut
    watch = asyncio.create_task(_watch_client(exchange, live, hub))
    try:
        await live.wait_open()
        if live.gone or live.shape is None or live.accepted is None:
            return
        await _answer(exchange, hub, live, live.shape, live.accepted)
    finally:
        watch.cancel()
        if not live.released:  # an error of our own: nobody waits for the rest
            hub.end(live, failure("internal_error"), "admin")


async def _answer(exchange: Exchange, hub: Hub, live: LiveRequest, shape: Shape, accepted: Accepted) -> None:
    identity, created = PREFIXES[shape.route] + secrets.token_hex(12), int(time.time())
    route_header = (b"x-deepinfer-route", f"rank={accepted.rank}; reason={accepted.reason}".encode())
    if shape.stream:
        form = ChunkForm(shape, identity, created, accepted.prompt_tokens, accepted.prompt_ids)
        headers: Headers = [exchange.id_header, route_header]
        await stream_answer(hub, live, form, exchange.start_stream, headers, exchange.connection)
        return
    await live.wait_end()
    if not live.gone:
        await exchange.answer(200, whole_answer(live, shape, identity, created), [route_header])


def _submit(route: str, body: bytes, exchange: Exchange, hub: Hub, timeout: float) -> LiveRequest:
    config = hub.config
    envelope = Generate(
        rid=hub.new_rid(),
        tenant=exchange.tenant,
        shape=None,
        sampling=Sampling(),
        route=route,
        session_key=exchange.session_key(),
        timeout=timeout,
    )
    if len(body) > config.limits.inline_body_bytes:
        return hub.submit(envelope, None, body)
    parsed, shape = parse(route, body, config.limits, config.served_models, config.test_hooks)
    return hub.submit(adopt(parsed, envelope), shape)


async def _watch_client(exchange: Exchange, live: LiveRequest, hub: Hub) -> None:
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
    if exchange.connection.stalled:
        hub.stall(live)
    else:
        hub.leave(live)
