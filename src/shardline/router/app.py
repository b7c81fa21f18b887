"""The router's HTTP application: its own endpoints, and the proxy for everything else."""

from __future__ import annotations

import ipaddress
import time
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.config.router import RouterConfig
from shardline.config.server import ServerConfig
from shardline.router.cluster import FleetWindow
from shardline.router.fleet import Fleet
from shardline.router.metrics import RouterMetrics
from shardline.router.proxy import Proxy
from shardline.server.errors import ApiError, bad_request
from shardline.server.keys import ApiKeys
from shardline.server.middleware import (
    AccessMiddleware,
    AuthMiddleware,
    BodyLimitMiddleware,
    InFlight,
    SlashMiddleware,
)
from shardline.server.user_middleware import cors


def create_app(fleet: Fleet, config: RouterConfig, server: ServerConfig, keys: ApiKeys, in_flight: InFlight) -> ASGIApp:
    """The application in front of `fleet`. Whoever runs it also runs a HealthChecker."""
    metrics = RouterMetrics(fleet)
    proxy = Proxy(fleet, config, metrics)
    window = FleetWindow(fleet, config)

    async def show_health(request: Request) -> Response:
        now = time.monotonic()
        ready = sum(backend.state(now) in ("ready", "busy") for backend in fleet.backends)
        text = {"status": "ready" if ready else "no backend is ready", "backends": f"{ready} of {len(fleet.backends)}"}
        is_well = ready > 0 or request.url.path == "/live"
        return _json(text, 200 if is_well else 503)

    async def show_metrics(request: Request) -> Response:
        body, kind = metrics.expose(request.headers.get("accept", ""))
        return Response(body, media_type=kind)

    async def show_cluster(request: Request) -> Response:
        return Response(await window.body(request.headers.get("authorization", "")), media_type="application/json")

    async def list_models(request: Request) -> Response:
        return _json({"object": "list", "data": fleet.models()})

    async def show_status(request: Request) -> Response:
        _require_local(request, keys)
        now = time.monotonic()
        return _json({"policy": fleet.policy, "backends": [backend.status(now) for backend in fleet.backends]})

    async def change_fleet(request: Request) -> Response:
        _require_local(request, keys)
        url = await _read_url(request)
        try:
            match request.path_params["action"]:
                case "add":
                    fleet.add(url)
                case "remove":
                    fleet.remove(url)
                case "drain":
                    fleet.find(url).is_draining = True
                case "undrain":
                    fleet.find(url).is_draining = False
                case action:
                    raise ApiError(404, f"There is no action {action}; there are: add, drain, remove, undrain.")
        except (ValueError, LookupError) as error:
            raise bad_request(str(error.args[0])) from None
        return await show_status(request)

    async def answer_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            return error.response()
        asked = f"{request.method} {request.url.path}"
        if error.status_code != 405:
            return ApiError(error.status_code, f"Invalid URL ({asked})", code="unknown_url").response()
        refusal = ApiError(405, f"The router does not take {asked}.", code="method_not_allowed")
        refusal.headers = error.headers
        return refusal.response()

    routes = [
        *(Route(path, show_health) for path in ("/live", "/ready", "/health", "/ping")),
        Route("/metrics", show_metrics),
        Route("/v1/models", list_models),
        Route("/cluster", show_cluster),
        Route("/router/status", show_status),
        Route("/router/{action}", change_fleet, methods=["POST"]),
    ]
    own = Starlette(routes=routes, exception_handlers={HTTPException: answer_error})
    own.router.redirect_slashes = False
    own_paths = frozenset(route.path for route in routes)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """The framework looks at one route after another: only what is not proxied pays for that."""
        is_own = scope["type"] != "http" or scope["path"] in own_paths or scope["path"].startswith("/router/")
        if is_own:
            await own(scope, receive, send)
        else:
            await in_flight.run(proxy, scope, receive, send)

    outermost: ASGIApp = app
    for middleware in reversed(_middleware(server, keys)):
        outermost = middleware.cls(outermost, *middleware.args, **middleware.kwargs)
    return outermost


def _middleware(server: ServerConfig, keys: ApiKeys) -> list[Middleware]:
    """The middleware, outermost first. CORS comes before the keys, since preflight requests carry no key."""
    log = not server.disable_access_log
    stack = [Middleware(AccessMiddleware, answers=None, log=log, names_all=server.enable_request_id_headers)]
    stack += cors(server)
    if keys.are_required or keys.has_admin:
        stack.append(Middleware(AuthMiddleware, keys=keys))
    stack += [Middleware(SlashMiddleware), Middleware(BodyLimitMiddleware, limit=server.body_limit)]
    return stack


def _require_local(request: Request, keys: ApiKeys) -> None:
    """Without a key for administration, only this machine may look at and change the fleet."""
    host = request.client.host if request.client else "127.0.0.1"
    if not keys.has_admin and not ipaddress.ip_address(host).is_loopback:
        raise ApiError(401, "Administration from other machines needs a key: start the router with --admin-api-key.")


async def _read_url(request: Request) -> str:
    try:
        url = msgspec.json.decode(await request.body())["url"]
    except (msgspec.DecodeError, KeyError, TypeError):
        url = None
    if not isinstance(url, str):
        raise bad_request('The body must be {"url": "http://host:port"}.', "url")
    return url


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
