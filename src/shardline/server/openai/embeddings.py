"""POST /v1/embeddings: the vectors of texts, of token ids, or of a conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from shardline.server.json_body import StrictRoute
from shardline.server.pooling.encoding import EncodingFields, encoded_answers
from shardline.server.pooling.request import PoolingUsage, PromptFields, pool_prompts, pooling_usage, require_task
from shardline.server.service import Service, new_id


class EmbeddingRequest(PromptFields, EncodingFields):
    """The body of POST /v1/embeddings."""

    dimensions: int | None = None
    """Keep only so many of a vector's first numbers; None: all."""


class EmbeddingItem(msgspec.Struct, kw_only=True, frozen=True):
    """The vector of one input: numbers, or the base64 of their bytes."""

    object: str = "embedding"
    index: int
    embedding: list[Any] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The vectors, in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    data: Sequence[EmbeddingItem]
    model: str
    usage: PoolingUsage


def embedding_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/embeddings", responses=encoded_answers(EmbeddingResponse))
    async def create_embeddings(body: EmbeddingRequest) -> Response:
        """The vectors of one or several inputs."""
        service.require_model(body.model)
        require_task(service, "embed")
        prompts = await body.encode_prompts(service)
        request_id = new_id("embd-")
        vectors = await pool_prompts(
            service, body, prompts, "embed", request_id=request_id, param="input", dimensions=body.dimensions
        )
        answer = EmbeddingResponse(
            id=request_id,
            created=int(time.time()),
            data=[]
            if body.sends_bytes
            else [EmbeddingItem(index=index, embedding=body.encode(vector)) for index, vector in enumerate(vectors)],
            model=service.model_names[0],
            usage=pooling_usage(prompts),
        )
        return body.write_answer(answer, vectors, body.ignored_headers)

    return router
