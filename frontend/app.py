"""The ASGI application: keys, routes, and the plain pages. Nothing here waits for an engine but the generate routes."""

from __future__ import annotations

import hmac
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import msgspec

from api.decode import decode_object
from api.errors import INVALID, ApiError, failure, invalid
from api.fields import check_integers, integer, mapping, string
from frontend.config import FrontendConfig
from frontend.exchange import ClientGone, Exchange, Receive, Send
from frontend.generate import generate
from frontend.hub import Hub
from frontend.metrics import Metrics

STATUS_SECONDS = 3.0  # a router that is silent for longer cannot vouch for the service
PAGE_SECONDS = 2.0
HOOK_SECONDS = 30.0
MAX_RANK = 1023
MODELS = "/v1/models/"
OPEN = frozenset({"/live", "/health"})
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[Exchange], Awaitable[None]]
log = logging.getLogger("deepinfer.frontend")


class App:
    """All routes. `draining` refuses new work; `active` counts exchanges that have not ended."""

    def __init__(self, config: FrontendConfig, hub: Hub, metrics: Metrics) -> None:
        self._config, self._hub, self._metrics = config, hub, metrics
        self._keys = [(key.encode(), tenant) for key, tenant in config.api_keys.items()]
        self.draining = False
        self.active = 0
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": lambda exchange: self._generate("chat", exchange)},
            "/v1/completions": {"POST": lambda exchange: self._generate("completions", exchange)},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/live": {"GET": self._live},
            "/metrics": {"GET": self._prometheus},
            "/deepinfer/metrics": {"GET": self._json_metrics},
        }
        if config.test_hooks:
            self._routes["/deepinfer/test/hook"] = {"POST": self._hook}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError("only HTTP is served")
        exchange = Exchange(scope, receive, send, self._config, self._metrics)
        self.active += 1
        try:
            await self._serve(exchange)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - a fault of ours: one log line, and the client gets a fixed text
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
            log.error("fault while answering: %s at %s", type(error).__name__, where)
            if not exchange.started:
                await exchange.refuse(failure("internal_error"))
            else:
                exchange.connection.cut()
        finally:
            self.active -= 1

    async def _serve(self, exchange: Exchange) -> None:
        try:
            self._authenticate(exchange)
            await self._handler(exchange)(exchange)
        except ApiError as error:
            if exchange.started:
                raise
            await exchange.refuse(error)

    def _authenticate(self, exchange: Exchange) -> None:
        if not self._keys or (exchange.method == "GET" and exchange.path in OPEN):
            return
        scheme, _, given = exchange.headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        found: str | None = None
        for key, tenant in self._keys:  # all of them, always: the time tells nothing
            if hmac.compare_digest(key, given):
                found = tenant
        if found is None or scheme.lower() != b"bearer" or b"authorization" in exchange.repeated:
            raise ApiError(
                401,
                "authentication_error",
                "invalid_api_key",
                None,
                "a valid API key is needed",
                [(b"www-authenticate", b"Bearer")],
            )
        exchange.tenant = found

    def _handler(self, exchange: Exchange) -> Handler:
        methods = self._routes.get(exchange.path)
        if methods is None and exchange.path.startswith(MODELS) and len(exchange.path) > len(MODELS):
            methods = {"GET": self._model}
        if methods is None:
            raise ApiError(404, INVALID, "not_found", None, "there is no such route")
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = methods.get(method)
        if handler is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            raise ApiError(
                405,
                INVALID,
                "method_not_allowed",
                None,
                "this route does not have this method",
                [(b"allow", allowed.encode())],
            )
        return handler

    # --- routes ---------------------------------------------------------------------------------------------------

    async def _generate(self, route: str, exchange: Exchange) -> None:
        if self.draining:
            raise failure("shutting_down")
        await generate(route, exchange, self._hub)

    def _describe(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._config.created, "owned_by": "deepinfer"}

    async def _models(self, exchange: Exchange) -> None:
        data = [self._describe(name) for name in self._config.served_models]
        await exchange.answer(200, msgspec.json.encode({"object": "list", "data": data}))

    async def _model(self, exchange: Exchange) -> None:
        name = unquote(exchange.path[len(MODELS) :])
        if name not in self._config.served_models:
            raise ApiError(404, INVALID, "model_not_found", "model", "this model is not served here")
        await exchange.answer(200, msgspec.json.encode(self._describe(name)))

    async def _live(self, exchange: Exchange) -> None:
        await exchange.answer(200, b'{"status":"ok"}')

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(200, msgspec.json.encode({"status": self.health()}))

    def health(self) -> str:
        """ "ok" or "degraded"; raises ApiError 503 when this service cannot do work now."""
        if self.draining:
            raise failure("shutting_down")
        hub = self._hub
        status, links = hub.status, hub.tokenizers
        silent = time.monotonic() - hub.status_at > STATUS_SECONDS
        if status is None or silent or not hub.router.up or not any(link.up for link in links):
            raise failure("engine_unavailable", hub.retry_seconds())
        if status.state not in ("ok", "degraded"):
            code = status.reason if status.reason == "kvnet_incompatible" else "engine_unavailable"
            raise failure(code, status.retry_after)
        return status.state if all(link.up for link in links) else "degraded"

    async def _prometheus(self, exchange: Exchange) -> None:
        page = await self._hub.metrics_page("prometheus", PAGE_SECONDS)
        await exchange.answer(200, page, kind=PROMETHEUS)

    async def _json_metrics(self, exchange: Exchange) -> None:
        await exchange.answer(200, await self._hub.metrics_page("json", PAGE_SECONDS))

    async def _hook(self, exchange: Exchange) -> None:
        exchange.require_json()
        limits = self._config.limits
        source = decode_object(await exchange.body(), limits.max_json_depth)
        name = string(source, "name")
        if not name:
            raise invalid("name", "name is required")
        rank = integer(source, "rank", 0, MAX_RANK) or 0
        args = mapping(source, "args") or {}
        check_integers(args, "args")
        reply = await self._hub.hook(rank, name, args, HOOK_SECONDS)
        await exchange.answer(200, msgspec.json.encode({"ok": reply.ok, "result": reply.result}))
