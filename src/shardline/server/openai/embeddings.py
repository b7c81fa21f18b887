"""POST /v1/embeddings: the vectors of texts or of token ids."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from shardline.api.outputs import EMBEDDING_PARAMS, normalized_embedding
from shardline.server.answer_schema import json_answers
from shardline.server.errors import bad_request
from shardline.server.json_body import StrictRoute
from shardline.server.openai.completions import PromptValue, encode_prompt, list_prompts
from shardline.server.openai.generation import Generation
from shardline.server.openai.protocol import IgnoredFields, truncate_prompt
from shardline.server.service import Service, new_id


class EmbeddingRequest(IgnoredFields):
    """The body of POST /v1/embeddings."""

    input: PromptValue
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    """Keep only so many of a vector's first numbers; None: all."""
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None


class EmbeddingItem(msgspec.Struct, kw_only=True, frozen=True):
    """The vector of one input: numbers, or the base64 of their bytes as little-endian float32."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The vectors, in the order of the inputs."""

    id: str
    object: str = "list"
    data: Sequence[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


def embedding_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/embeddings", responses=json_answers(EmbeddingResponse))
    async def create_embeddings(body: EmbeddingRequest) -> Response:
        """The vectors of one or several inputs."""
        service.require_model(body.model)
        with_special = body.add_special_tokens is not False
        prompts = [
            truncate_prompt(await encode_prompt(service, prompt, with_special), body.truncate_prompt_tokens)
            for prompt in list_prompts(body.input, "input")
        ]
        generation = await Generation.start(
            service,
            prompts,
            EMBEDDING_PARAMS,
            request_id=new_id("embd-"),
            prompt_param="input",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        async with generation:
            outputs = await generation.wait_finished()
        try:
            vectors = [normalized_embedding(output, body.dimensions) for output in outputs]
        except ValueError as error:
            raise bad_request(str(error), "dimensions") from error
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        answer = EmbeddingResponse(
            id=new_id("embd-"),
            data=[
                EmbeddingItem(index=index, embedding=_encoded(vector, body.encoding_format == "base64"))
                for index, vector in enumerate(vectors)
            ],
            model=service.model_names[0],
            usage=EmbeddingUsage(num_tokens, num_tokens),
        )
        return Response(msgspec.json.encode(answer), headers=body.ignored_headers, media_type="application/json")

    return router


def _encoded(vector: array[float], as_base64: bool) -> list[float] | str:
    if not as_base64:
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
