"""POST /v1/embeddings, POST /pooling and POST /classify: what the model makes of texts, token ids or a conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from shardline.api.pooling import PoolingTask
from shardline.server.documentation import json_answers
from shardline.server.json_body import StrictRoute
from shardline.server.openai.protocol import refuse_if
from shardline.server.pooling.encoding import EncodingFields, encoded_answers
from shardline.server.pooling.request import (
    PoolingUsage,
    PromptFields,
    pool_prompts,
    pooling_usage,
    require_pooler,
    require_task,
)
from shardline.server.service import Service, new_id

Item = TypeVar("Item")


class EmbeddingRequest(PromptFields, EncodingFields):
    """The body of POST /v1/embeddings."""

    dimensions: int | None = None
    """Keep only so many of a vector's first numbers; None: all."""


class EmbeddingItem(msgspec.Struct, kw_only=True, frozen=True):
    """The vector of one input: numbers, or the base64 of their bytes."""

    object: str = "embedding"
    index: int
    embedding: list[Any] | str


class PoolingRequest(PromptFields, EncodingFields):
    """The body of POST /pooling."""

    task: PoolingTask | None = None
    """None: the model's own, for the last token of each prompt."""
    dimensions: int | None = None
    """Of vectors, keep only so many of the first numbers; None: all."""


class PoolingItem(msgspec.Struct, kw_only=True, frozen=True):
    """The numbers of one prompt, of each of its tokens if the task is for tokens, or the base64 of their bytes."""

    index: int
    object: str = "pooling"
    data: list[Any] | str


class ClassificationRequest(PromptFields):
    """The body of POST /classify."""


class ClassificationItem(msgspec.Struct, kw_only=True, frozen=True):
    """The score of each label for one prompt, and the label with the largest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class PooledResponse(msgspec.Struct, Generic[Item], kw_only=True, frozen=True):
    """What each prompt was pooled to, in their order."""

    id: str
    object: str = "list"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    data: Sequence[Item]
    usage: PoolingUsage


def pooling_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/embeddings", responses=encoded_answers(PooledResponse[EmbeddingItem]))
    async def create_embeddings(body: EmbeddingRequest) -> Response:
        """The vectors of one or several inputs."""
        service.require_model(body.model)
        require_task(service, "embed")
        prompts = await body.encode_prompts(service)
        request_id = new_id("embd-")
        vectors = await pool_prompts(
            service, body, prompts, "embed", request_id=request_id, param="input", dimensions=body.dimensions
        )
        answer = PooledResponse(
            id=request_id,
            data=[]
            if body.sends_bytes
            else [EmbeddingItem(index=index, embedding=body.encode(vector)) for index, vector in enumerate(vectors)],
            model=service.name_of(body.model),
            usage=pooling_usage(prompts),
        )
        return body.write_answer(answer, vectors, body.ignored_headers)

    @router.post("/pooling", responses=encoded_answers(PooledResponse[PoolingItem]))
    async def create_pooling(body: PoolingRequest) -> Response:
        """What the model makes of prompts: vectors or the scores of labels, of each prompt or of each token."""
        service.require_model(body.model)
        pooler = require_pooler(service)
        task = body.task or pooler.tasks[0]
        require_task(service, task)
        refuse_if(
            body.dimensions is not None and pooler.labels is not None,
            "dimensions",
            "'dimensions' are of vectors, and this model classifies.",
        )
        prompts = await body.encode_prompts(service)
        request_id = new_id("pooling-")
        values = await pool_prompts(
            service, body, prompts, task, request_id=request_id, param="input", dimensions=body.dimensions
        )
        answer = PooledResponse(
            id=request_id,
            model=service.name_of(body.model),
            data=[]
            if body.sends_bytes
            else [PoolingItem(index=index, data=body.encode(one)) for index, one in enumerate(values)],
            usage=pooling_usage(prompts),
        )
        return body.write_answer(answer, values, body.ignored_headers)

    @router.post("/classify", responses=json_answers(PooledResponse[ClassificationItem]))
    async def create_classification(body: ClassificationRequest) -> Response:
        """The scores of the model's labels for each prompt."""
        service.require_model(body.model)
        pooler = require_task(service, "classify")
        prompts = await body.encode_prompts(service)
        request_id = new_id("classify-")
        scores = await pool_prompts(service, body, prompts, "classify", request_id=request_id, param="input")
        assert pooler.labels is not None
        labels = pooler.labels.labels
        answer = PooledResponse(
            id=request_id,
            model=service.name_of(body.model),
            data=[
                ClassificationItem(
                    index=index, label=labels[int(one.argmax())], probs=one.tolist(), num_classes=len(labels)
                )
                for index, one in enumerate(scores)
            ],
            usage=pooling_usage(prompts),
        )
        return Response(msgspec.json.encode(answer), headers=body.ignored_headers, media_type="application/json")

    return router
