"""POST /generative_scoring: how likely a model that generates finds given tokens after a query and each item."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from shardline.server.documentation import json_answers
from shardline.server.errors import bad_request
from shardline.server.json_body import StrictRoute
from shardline.server.openai.completions.request import MAX_PROMPTS, TokenIdLists, encode_prompt
from shardline.server.openai.ignored_fields import IgnoredFields
from shardline.server.openai.named_tokens import MAX_NAMED, named_logprobs, score_named
from shardline.server.openai.protocol import TokenIds
from shardline.server.pooling.request import PoolingUsage, check_tokens
from shardline.server.pooling.scores import ScoreItem, ScoreResponse
from shardline.server.service import Service, new_id


class GenerativeScoringRequest(IgnoredFields):
    """The body of POST /generative_scoring."""

    query: str | TokenIds
    items: Annotated[list[str], Field(fail_fast=True)] | TokenIdLists
    label_token_ids: Annotated[list[int], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    """The tokens whose probabilities are wanted; the score is that of the first one."""
    apply_softmax: bool | None = None
    """Whether the probabilities of the labels add up to 1; None: they do. Else they are those among all tokens."""
    item_first: bool | None = None
    """Whether each item comes before the query; None: after it."""
    add_special_tokens: bool | None = None
    model: str | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def check(self, vocab_size: int) -> None:
        """Check the fields.

        Raises:
            ApiError: 400, there are no items or labels, or a label is no token.
        """
        if not self.items or len(self.items) > MAX_PROMPTS:
            raise bad_request(f"items must contain at least one item, and at most {MAX_PROMPTS}.", "items")
        if not self.label_token_ids:
            raise bad_request("label_token_ids must contain at least one token ID.", "label_token_ids")
        for token_id in self.label_token_ids:
            if not 0 <= token_id < vocab_size:
                raise bad_request(
                    f"label_token_id {token_id} is out of vocabulary range [0, {vocab_size}).", "label_token_ids"
                )

    async def encode_prompts(self, service: Service) -> list[list[int]]:
        """The prompt of each item; the end of one that is too long is cut off.

        Raises:
            ApiError: 400, the model has no tokenizer.
        """
        query = await encode_prompt(service, self.query, self.add_special_tokens is not False)
        longest = service.llm.model.max_model_len - 1
        query = query[:longest]
        check_tokens(len(query) * len(self.items), "query")
        prompts = []
        for item in self.items:
            token_ids = (await encode_prompt(service, item, False))[:longest]
            whole = [*token_ids, *query] if self.item_first else [*query, *token_ids]
            prompts.append(whole[:longest])
        return prompts


def generative_scoring_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/generative_scoring", responses=json_answers(ScoreResponse))
    async def create_generative_scoring(body: GenerativeScoringRequest) -> Response:
        """The probability of the first label as the next token after the query and each item."""
        service.require_model(body.model)
        body.check(service.llm.model.builder.vocab_size)
        prompts = await body.encode_prompts(service)
        # One whose probabilities add up to 1 with no others needs no others.
        labels = list(dict.fromkeys(body.label_token_ids)) if body.apply_softmax is not False else []
        labels = labels or body.label_token_ids[:1]
        request_id = new_id("generative-scoring-")
        wanted = [labels[first : first + MAX_NAMED] for first in range(0, len(labels), MAX_NAMED)]
        outputs = await score_named(
            service,
            [prompt for prompt in prompts for _ in wanted],
            wanted * len(prompts),
            request_id=request_id,
            param="items",
            priority=body.priority,
            cache_salt=body.cache_salt,
            model=body.model,
        )
        per_item: list[dict[int, float]] = [{} for _ in prompts]
        for number, output in enumerate(outputs):
            per_item[number // len(wanted)] |= named_logprobs(output)
        num_tokens = sum(map(len, prompts))
        answer = ScoreResponse(
            id=request_id,
            created=int(time.time()),
            model=service.name_of(body.model),
            data=[
                ScoreItem(
                    index=index,
                    score=_score([own[label] for label in labels], softmax=body.apply_softmax is not False),
                )
                for index, own in enumerate(per_item)
            ],
            usage=PoolingUsage(num_tokens, num_tokens + len(prompts), len(prompts)),
        )
        return Response(msgspec.json.encode(answer), headers=body.ignored_headers, media_type="application/json")

    return router


def _score(logprobs: Sequence[float], *, softmax: bool) -> float:
    """The probability of the first label, among all tokens or among the labels."""
    if not softmax:
        return math.exp(logprobs[0])
    largest = max(logprobs)
    return math.exp(logprobs[0] - largest) / math.fsum(math.exp(one - largest) for one in logprobs)
