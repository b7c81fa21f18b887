"""Scores of pairs of texts: POST /score and POST /rerank, and their versions below /v1 and /v2.

Embeddings are compared by their cosine. A classifier of one label reads both texts at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from shardline.api.pooled_batches import pair_conversation
from shardline.api.pooling import PoolingTask, cosine, pair_up
from shardline.server.documentation import json_answers
from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel, StrictRoute, check_template_values
from shardline.server.openai.completions.request import MAX_PROMPTS
from shardline.server.pooling.request import (
    PoolingFields,
    PoolingUsage,
    check_tokens,
    pool_prompts,
    pooling_usage,
    require_pooler,
)
from shardline.server.service import Service, new_id

_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""The names that the two sides of pairs may have."""


class TextPart(RequestModel):
    """A part of a text. Only text is supported."""

    type: str
    text: str | None = None


class TextParts(RequestModel):
    """A text in parts, as messages have it."""

    content: Annotated[list[TextPart], Field(max_length=MAX_PROMPTS, fail_fast=True)]


Text = str | TextParts
TextValue = Text | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)]


class PairFields(PoolingFields):
    """The fields of both kinds of requests."""

    max_tokens_per_query: Annotated[int, Field(ge=0)] | None = None
    """Keep only so many tokens of the first text; None or 0: all."""
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = None
    instruction: str | None = None
    """A variable of the chat template for pairs."""
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        own = {} if self.instruction is None else {"instruction": self.instruction}
        return {**own, **(self.chat_template_kwargs or {})}


class ScoreRequest(PairFields):
    """The body of POST /score. One text is paired with each of the other side, or each with its own."""

    queries: TextValue | None = None
    documents: TextValue | None = None
    items: TextValue | None = None
    data_1: TextValue | None = None
    data_2: TextValue | None = None
    text_1: TextValue | None = None
    text_2: TextValue | None = None

    def sides(self) -> tuple[list[str], list[str], str]:
        """The two sides of the pairs, and the name of the field with the second one.

        Raises:
            ApiError: 400, there are not two of them.
        """
        given = {name for names in _SIDES for name in names if getattr(self, name) is not None}
        for first, second in _SIDES:
            if given == {first, second}:
                texts = _list_texts(getattr(self, first), first)
                return texts, _list_texts(getattr(self, second), second), second
        names = ", ".join(f"'{first}' and '{second}'" for first, second in _SIDES)
        raise bad_request(f"Send the two sides of the pairs as {names}.", "text_1", "missing_required_parameter")


class ScoreItem(msgspec.Struct, kw_only=True, frozen=True):
    """The score of one pair, or of one item behind a query."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The scores, in the order of the second texts or of the items."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: Sequence[ScoreItem]
    usage: PoolingUsage


class RerankRequest(PairFields):
    """The body of POST /rerank."""

    query: Text
    documents: TextValue
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Answer with so many of the best documents; None or 0: with all."""
    return_documents: bool | None = None
    """Accepted, but has no effect: the answer has the documents."""


class RerankDocument(msgspec.Struct, kw_only=True, frozen=True):
    """A document."""

    text: str
    multi_modal: None = None


class RerankItem(msgspec.Struct, kw_only=True, frozen=True):
    """A document and its score."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The documents, those first that fit the query best."""

    id: str
    model: str
    usage: PoolingUsage
    results: Sequence[RerankItem]


def score_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/score", responses=json_answers(ScoreResponse))
    @router.post("/v1/score", responses=json_answers(ScoreResponse))
    async def create_score(body: ScoreRequest) -> Response:
        """How well the texts of each pair fit."""
        service.require_model(body.model)
        task = _pair_task(service)
        request_id = new_id("score-")
        scores, usage = await _score_pairs(service, body, *body.sides(), task, request_id)
        answer = ScoreResponse(
            id=request_id,
            created=int(time.time()),
            model=service.name_of(body.model),
            data=[ScoreItem(index=index, score=score) for index, score in enumerate(scores)],
            usage=usage,
        )
        return Response(msgspec.json.encode(answer), headers=body.ignored_headers, media_type="application/json")

    @router.post("/rerank", responses=json_answers(RerankResponse))
    @router.post("/v1/rerank", responses=json_answers(RerankResponse))
    @router.post("/v2/rerank", responses=json_answers(RerankResponse))
    async def create_ranking(body: RerankRequest) -> Response:
        """The documents in the order in which they fit the query."""
        service.require_model(body.model)
        task = _pair_task(service)
        query, documents = _list_texts(body.query, "query"), _list_texts(body.documents, "documents")
        request_id = new_id("score-")
        scores, usage = await _score_pairs(service, body, query, documents, "documents", task, request_id)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        answer = RerankResponse(
            id=request_id,
            model=service.name_of(body.model),
            usage=usage,
            results=[
                RerankItem(index=one, document=RerankDocument(text=documents[one]), relevance_score=scores[one])
                for one in ranked
            ],
        )
        return Response(msgspec.json.encode(answer), headers=body.ignored_headers, media_type="application/json")

    return router


def _pair_task(service: Service) -> PoolingTask:
    try:
        return require_pooler(service).check_pairs()
    except ValueError as error:
        raise bad_request(f"{error}.", code="unsupported_parameter") from error


def _list_texts(value: TextValue, param: str) -> list[str]:
    return [_text(one, param) for one in (value if isinstance(value, list) else [value])]


def _text(value: Text, param: str) -> str:
    if isinstance(value, str):
        return value
    if any(part.type != "text" or part.text is None for part in value.content):
        raise bad_request(f"'{param}' has a part that is no text; this model takes text only.", param)
    return "".join(part.text or "" for part in value.content)


async def _score_pairs(
    service: Service,
    body: PairFields,
    first: list[str],
    second: list[str],
    param: str,
    task: PoolingTask,
    request_id: str,
) -> tuple[list[float], PoolingUsage]:
    """The score of each pair, and the usage; `param` is the field with the second texts."""
    try:
        pair_up(first, second)
    except ValueError as error:
        raise bad_request(f"{error}.", param) from error
    first = [await _cut_text(service, text, body.max_tokens_per_query, "max_tokens_per_query") for text in first]
    second = [await _cut_text(service, text, body.max_tokens_per_doc, "max_tokens_per_doc") for text in second]
    if task == "embed":
        prompts = [await body.encode_text(service, text, True) for text in (*first, *second)]
        vectors = await pool_prompts(service, body, prompts, task, request_id=request_id, param=param)
        left, right = vectors[: len(first)], vectors[len(first) :]
        pairs = zip(left * (len(right) // len(left)), right, strict=True)
        return [cosine(one, other) for one, other in pairs], pooling_usage(prompts)
    prompts, num_tokens = [], 0
    for query, document in zip(first * (len(second) // len(first)), second, strict=True):
        prompts.append(await _join(service, body, query, document))
        num_tokens += len(prompts[-1])
        check_tokens(num_tokens, param)
    scores = await pool_prompts(service, body, prompts, task, request_id=request_id, param=param)
    return [float(one[0]) for one in scores], pooling_usage(prompts)


async def _join(service: Service, body: PairFields, query: str, document: str) -> list[int]:
    """The prompt of a pair: both texts, or what a configured template writes; that of the model is for chats."""
    if service.configured_template is None:
        return await body.encode_text(service, query + document, True)
    check_template_values("chat_template_kwargs", [body.chat_template_kwargs or {}])
    chat = pair_conversation(query, document, {**service.config.template_variables, **body.template_variables})
    limit = service.llm.model.max_model_len
    _, token_ids = await service.encode_chat(chat, max_tokens=limit, param="chat_template_kwargs")
    return body.truncate(service, token_ids)


async def _cut_text(service: Service, text: str, most: int | None, param: str) -> str:
    """The beginning of a text, with at most `most` tokens; None or 0: all of it."""
    if not most:
        return text
    longest = service.llm.model.max_model_len
    if most >= longest:
        raise bad_request(f"{param} ({most}) must be less than max_model_len ({longest}).", param)
    # The text is cut, not the tokens: those of its beginning may be others.
    offsets = await asyncio.to_thread(service.require_tokenizer().token_offsets, text, False)
    return text if len(offsets) <= most else text[: min(offsets[most - 1][1], offsets[most][0])]
