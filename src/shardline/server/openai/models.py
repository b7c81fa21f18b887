"""GET /v1/models and /v1/models/{model}: the served models."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from shardline.server.answer_schema import json_answers
from shardline.server.service import Service


class ModelCard(msgspec.Struct, kw_only=True, frozen=True):
    """One name under which the model is served; `root` is the model as it was given."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "shardline"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True, frozen=True):
    """All names under which the model is served."""

    object: str = "list"
    data: list[ModelCard]


def model_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter()

    def card(name: str) -> ModelCard:
        llm = service.llm
        return ModelCard(id=name, created=service.created, root=llm.config.model.model, max_model_len=llm.max_model_len)

    def answer(body: ModelCard | ModelList) -> Response:
        return Response(msgspec.json.encode(body), media_type="application/json")

    @router.get("/v1/models", responses=json_answers(ModelList))
    async def list_models() -> Response:
        """Every name under which the model is served."""
        return answer(ModelList(data=[card(name) for name in service.model_names]))

    # A hub id contains a slash.
    @router.get("/v1/models/{model:path}", responses=json_answers(ModelCard))
    async def show_model(model: str) -> Response:
        """One name under which the model is served."""
        service.require_model(model)
        return answer(card(model))

    return router
