"""GET /cluster."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shardline.server.answer_schema import json_answers
from shardline.server.service import Service
from shardline.server.window.cluster import Cluster
from shardline.server.window.feed import ClusterStream


def window_routes(service: Service) -> APIRouter:
    """The endpoint. It needs a key where one is set, since it names hosts and processes."""
    router = APIRouter()

    @router.get("/cluster", responses=json_answers(Cluster), response_class=Response)
    async def cluster(request: Request, history: bool = True) -> Response:
        """Hosts, replicas and ranks now, and the last ten minutes; server-sent events with Accept: text/event-stream,
        one a second, of which the first has the history."""
        if "text/event-stream" in request.headers.get("accept", ""):
            return ClusterStream(service.window)
        return Response(service.window.body(history=history), media_type="application/json")

    return router
