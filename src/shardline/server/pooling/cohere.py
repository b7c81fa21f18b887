"""POST /v2/embed: the vectors of texts, in Cohere's shape."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from starlette.responses import Response

from shardline.api.pooling import Values
from shardline.server.documentation import json_answers
from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel, StrictRoute
from shardline.server.openai.chat.messages import MAX_PARTS, ChatMessage, ContentPart
from shardline.server.openai.completions.request import MAX_PROMPTS
from shardline.server.openai.protocol import refuse_if
from shardline.server.pooling.request import PromptFields, pool_prompts, require_task
from shardline.server.service import Service, new_id

EmbeddingForm = Literal["float", "base64", "binary", "ubinary"]


class EmbedInput(RequestModel):
    """One input in parts."""

    content: Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


class EmbedRequest(RequestModel):
    """The body of POST /v2/embed. Unknown fields are ignored, as in vLLM."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    texts: Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    inputs: Annotated[list[EmbedInput], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    images: Any = None
    input_type: str | None = None
    output_dimension: int | None = None
    """Keep only so many of a vector's first numbers; None: all."""
    embedding_types: Annotated[list[EmbeddingForm], Field(max_length=len(get_args(EmbeddingForm)))] | None = None
    """In which forms the vectors are sent; None: as floats. "binary": eight signs in a number."""
    truncate: Literal["NONE", "START", "END"] = "END"
    """Where tokens are cut off that `max_tokens`, or the model, does not take; "NONE": such an input is refused."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    priority: int | None = None

    async def encode_prompts(self, service: Service) -> list[list[int]]:
        """The token ids of each input.

        Raises:
            ApiError: 400, there is not one of `texts` and `inputs`, or one of them cannot be encoded.
        """
        refuse_if(self.images is not None, "images", "Models here take text only: send 'texts'.")
        refuse_if(
            self.input_type is not None,
            "input_type",
            f"Unsupported input_type '{self.input_type}': write what the model expects before a text into 'texts'.",
        )
        if bool(self.texts) == bool(self.inputs):
            raise bad_request("Send 'texts' or 'inputs'.", "texts", "missing_required_parameter")
        cut: dict[str, Any] = {}
        if self.truncate != "NONE":
            most = -1 if self.max_tokens is None else min(self.max_tokens, service.llm.model.max_model_len)
            side = "left" if self.truncate == "START" else "right"
            cut = {"truncate_prompt_tokens": most, "truncation_side": side}
        if self.texts:
            prompts = await PromptFields(input=self.texts, **cut).encode_prompts(service)
        else:
            prompts = []
            for one in self.inputs or ():
                conversation = [ChatMessage(role="user", content=one.content)]
                prompts += await PromptFields(messages=conversation, **cut).encode_prompts(service)
        longest = max(map(len, prompts))
        if self.max_tokens is not None and longest > self.max_tokens:
            raise bad_request(
                f"An input has {longest} tokens, more than 'max_tokens': with 'truncate' END or START, it is cut.",
                "max_tokens",
            )
        return prompts


class ApiVersion(msgspec.Struct, frozen=True):
    """The version of Cohere's API that this is."""

    version: str = "2"


class BilledUnits(msgspec.Struct, frozen=True):
    """Number of tokens of all inputs."""

    input_tokens: int
    image_tokens: int = 0


class EmbedMeta(msgspec.Struct, frozen=True):
    """What an answer says about itself."""

    billed_units: BilledUnits
    api_version: ApiVersion = ApiVersion()


class EmbedResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The vectors in each form, in the order of the inputs."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str] | msgspec.UnsetType = msgspec.UNSET
    meta: EmbedMeta
    response_type: str = "embeddings_by_type"


def _write(vectors: Sequence[Values], kind: EmbeddingForm) -> list[Any]:
    """Vectors in one form.

    Raises:
        ApiError: 400, their size has no such form.
    """
    if kind == "base64":
        return [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in vectors]
    numbers: NDArray[Any] = np.stack(vectors)
    if kind != "float":
        size = numbers.shape[1]
        refuse_if(size % 8 != 0, "embedding_types", f"Vectors of {size} numbers are not {kind}: 8 must divide that.")
        numbers = np.packbits(numbers >= 0, axis=1)
        if kind == "binary":
            numbers = numbers.astype(np.int16) - 128
    written: list[Any] = numbers.tolist()
    return written


def cohere_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v2/embed", responses=json_answers(EmbedResponse))
    async def embed(body: EmbedRequest) -> Response:
        """The vectors of one or several inputs."""
        service.require_model(body.model)
        require_task(service, "embed")
        prompts = await body.encode_prompts(service)
        request_id = new_id("embd-")
        vectors = await pool_prompts(
            service,
            PromptFields(priority=body.priority),
            prompts,
            "embed",
            request_id=request_id,
            param="texts" if body.texts else "inputs",
            dimensions=body.output_dimension,
        )
        answer = EmbedResponse(
            id=request_id,
            embeddings={kind: _write(vectors, kind) for kind in body.embedding_types or ["float"]},
            texts=body.texts or msgspec.UNSET,
            meta=EmbedMeta(BilledUnits(sum(map(len, prompts)))),
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
