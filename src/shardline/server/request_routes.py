"""GET /requests/{id}: where the time of a request went."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from shardline.server.answer_schema import json_answers
from shardline.server.errors import ApiError
from shardline.server.request_log import MOST_REQUESTS
from shardline.server.service import Service


def request_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.get("/requests/{request_id}", responses=json_answers(dict[str, Any]))
    async def get_request(request_id: str) -> Response:
        """Where the time of a request went. It needs the admin key, where one is set."""
        found = service.request_log.find(request_id)
        if found is None:
            raise ApiError(
                404,
                f"No request `{request_id}` runs here or is among the last (at most {MOST_REQUESTS}) that finished.",
                code="request_not_found",
            )
        return Response(msgspec.json.encode(found), media_type="application/json")

    return router
