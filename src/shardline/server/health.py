"""The endpoints for probes and monitoring: liveness, readiness, health, version and metrics."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shardline import __version__
from shardline.server.service import RETRY_STARTING_SECONDS, Service


def health_routes(service: Service) -> APIRouter:
    """The endpoints; none of them needs a key."""
    router = APIRouter()

    def answer(healthy: bool) -> Response:
        state = service.llm.state()
        body: dict[str, str] = {"status": state}
        if state == "dead":
            body["reason"] = service.llm.dead_reason
        alive = service.llm.replicas_alive()
        if not all(alive):
            body["replicas"] = f"{sum(alive)} of {len(alive)} alive"
        headers = (
            {"Retry-After": str(RETRY_STARTING_SECONDS)}
            if state in ("starting", "recovering") and not healthy
            else None
        )
        return Response(msgspec.json.encode(body), 200 if healthy else 503, headers, "application/json")

    @router.head("/live")
    @router.get("/live")
    async def live() -> Response:
        """Whether the process should go on running: 503 only after the engine has died."""
        return answer(service.llm.state() != "dead")

    @router.head("/ready")
    @router.get("/ready")
    async def ready() -> Response:
        """Whether clients should send new requests here: 503 also while starting, recovering or draining."""
        return answer(service.llm.state() == "ready")

    @router.get("/ping")
    @router.post("/ping")
    @router.head("/health")
    @router.get("/health")
    async def health() -> Response:
        """Whether the engine works: 200 also while draining, since it still finishes its requests."""
        return answer(service.llm.state() in ("ready", "draining"))

    @router.get("/version")
    async def version() -> Response:
        """The version of Shardline."""
        return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")

    if service.config.enable_metrics:

        @router.get("/metrics")
        async def metrics(request: Request) -> Response:
            """Prometheus metrics."""
            body, content_type = service.metrics.expose(request.headers.get("accept", ""))
            return Response(body, headers={"Content-Type": content_type})

    return router
