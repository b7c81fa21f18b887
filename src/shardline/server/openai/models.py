"""The served models, and their tokens: GET /v1/models, POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from shardline.server.documentation import json_answers
from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel, StrictRoute
from shardline.server.openai.chat.conversation import ConversationFields
from shardline.server.openai.chat.messages import Messages
from shardline.server.openai.protocol import TokenIds
from shardline.server.prompts import decode_tokens, encode_text, most_encoded
from shardline.server.service import Service


class ModelCard(msgspec.Struct, kw_only=True, frozen=True):
    """One name under which the model is served; `root` is the model as it was given."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "shardline"
    root: str
    parent: str | None = None
    """Of an adapter: the model that it changes."""
    max_model_len: int
    numeric_contract: str
    """Its SHA-256: servers with equal ones give equal answers, see GET /server_info."""


class ModelList(msgspec.Struct, kw_only=True, frozen=True):
    """All names under which the model is served."""

    object: str = "list"
    data: list[ModelCard]


def model_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter()

    def card(name: str) -> ModelCard:
        llm, adapter = service.llm, service.adapters.named.get(name)
        return ModelCard(
            id=name,
            created=service.created,
            root=llm.config.model.model if adapter is None else adapter.ref.folder,
            parent=None if adapter is None else adapter.parent or service.model_names[0],
            max_model_len=llm.model.max_model_len,
            numeric_contract=llm.model.contract.sha256,
        )

    def answer(body: ModelCard | ModelList) -> Response:
        return Response(msgspec.json.encode(body), media_type="application/json")

    @router.get("/v1/models", responses=json_answers(ModelList))
    async def list_models() -> Response:
        """Every name under which the model is served."""
        return answer(ModelList(data=[card(name) for name in (*service.model_names, *service.adapters.named)]))

    # A hub id contains a slash.
    @router.get("/v1/models/{model:path}", responses=json_answers(ModelCard))
    async def show_model(model: str) -> Response:
        """One name under which the model is served."""
        service.require_model(model)
        return answer(card(model))

    return router


class TokenizeRequest(ConversationFields):
    """The body of POST /tokenize: `prompt` or `messages`."""

    messages: Messages | None = None
    prompt: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    """None: as in the generating endpoints, true for `prompt` and false for `messages`."""
    return_token_strs: bool | None = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    """Of images and sounds, which no model here takes."""


class DetokenizeRequest(RequestModel):
    """The body of POST /detokenize."""

    tokens: TokenIds
    model: str | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    """The ids, their number, and the largest number that the model supports."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The text."""

    prompt: str


def tokenize_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/tokenize", responses=json_answers(TokenizeResponse))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text or a conversation."""
        service.require_model(body.model)
        limit = most_encoded(service)
        if body.prompt is not None and body.messages is None:
            ids = await encode_text(service, body.prompt, body.add_special_tokens is not False, max_tokens=limit)
        elif body.messages is not None and body.prompt is None:
            special = bool(body.add_special_tokens)
            ids = (await body.encode_messages(service, body.messages, special, max_tokens=limit)).token_ids
        else:
            raise bad_request("Set either 'prompt' or 'messages'.", "prompt")
        strings = None
        if body.return_token_strs:
            tokenizer = service.require_tokenizer()
            strings = [tokenizer.token(token_id) for token_id in ids]
        answer = TokenizeResponse(len(ids), service.llm.model.max_model_len, ids, strings)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.get("/tokenizer_info", responses=json_answers(dict[str, Any]))
    async def describe_tokenizer() -> Response:
        """What a client must know to prepare prompts: special tokens and the chat template."""
        tokenizer, template = service.require_tokenizer(), service.chat.template
        sources = {} if template is None else template.sources
        answer = {
            **tokenizer.special_tokens,
            "tokenizer_class": "TokenizersBackend",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": service.llm.model.max_model_len,
            "chat_template": next(iter(sources.values()), None),
        }
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.post("/detokenize", responses=json_answers(DetokenizeResponse))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.require_model(body.model)
        limit = most_encoded(service)
        if len(body.tokens) > limit:
            raise bad_request(f"'tokens' has {len(body.tokens)} entries; at most {limit} are taken.", "tokens")
        text = decode_tokens(service, body.tokens)
        return Response(msgspec.json.encode(DetokenizeResponse(text)), media_type="application/json")

    return router
