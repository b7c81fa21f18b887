"""POST …/render: what an endpoint would run, as requests of /inference/v1/generate. Nothing is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shardline.api.prompts import EncodedPrompt
from shardline.sampling_params import SamplingParams
from shardline.server.anthropic.request import MessagesRequest
from shardline.server.anthropic.routes import prepare_message
from shardline.server.cohere.request import CohereChatRequest
from shardline.server.cohere.routes import prepare_cohere_chat
from shardline.server.documentation import json_answers
from shardline.server.json_body import StrictRoute
from shardline.server.openai.answer_to_chat import PreparedChat
from shardline.server.openai.chat.request import ChatRequest, prepare_chat
from shardline.server.openai.completions.request import CompletionRequest, prepare_completion
from shardline.server.openai.engine_errors import as_api_error
from shardline.server.openai.protocol import SamplingFields, bad_parameter, refuse_if
from shardline.server.openai.responses.request import ResponsesRequest
from shardline.server.openai.responses.routes import prepare_response
from shardline.server.scale_out.generate import base_request_id
from shardline.server.service import Service, new_id


class RenderedRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A body of POST /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    token_offsets: Sequence[Sequence[int]] | None
    """Where each token stands in the prompt's text; None: that was not asked for, or is not known."""
    features: None = None
    sampling_params: dict[str, Any]
    model: str | None
    reasoning_ended: bool | None = None
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int


def sampling_fields(params: SamplingParams, max_tokens: int, grammar: str) -> dict[str, Any]:
    """Sampling parameters as a request has them. `grammar`: that of the output; empty: there is none."""
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    fields |= {
        "max_tokens": max_tokens,
        "logit_bias": {str(token_id): value for token_id, value in params.logit_bias.items()} or None,
        "stop": list(params.stop_strings),
        "structured_outputs": {"grammar": grammar} if grammar else None,
    }
    return fields


async def _token_offsets(
    service: Service, body: SamplingFields, text: str | None, token_ids: Sequence[int], with_special: bool
) -> list[tuple[int, int]] | None:
    """Where the tokens of a prompt stand in its text. None: that was not asked for, or the prompt has no text."""
    if not body.return_token_offsets or text is None:
        return None
    offsets = await asyncio.to_thread(service.require_tokenizer().token_offsets, text, with_special)
    offsets = body.truncate_prompt(offsets)
    # A special token that a user spells stays text, so the text alone would be encoded otherwise.
    return offsets if len(offsets) == len(token_ids) else None


def _refuse_beams(body: SamplingFields) -> None:
    refuse_if(bool(body.use_beam_search), "use_beam_search", "Beam search is not supported by the render endpoint.")


def render_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)

    def render(
        body: SamplingFields,
        model: str | None,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        grammar: str,
        offsets: list[tuple[int, int]] | None,
        reasoning_ended: bool | None = None,
    ) -> RenderedRequest:
        try:  # what an engine would refuse is not rendered
            built = service.llm.model.builder.build_request(
                request_id,
                EncodedPrompt(token_ids),
                params,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                grammar=grammar,
            )
        except ValueError as error:
            param = "prompt" if isinstance(body, CompletionRequest) else "messages"
            raise as_api_error(error, param) or bad_parameter(str(error)) from error
        params = msgspec.structs.replace(params, top_k=built.params.top_k)  # as large a one as JSON may have is none
        room = service.llm.model.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        options = body.check_stream() if body.stream else None
        return RenderedRequest(
            request_id=request_id,
            token_ids=token_ids,
            token_offsets=offsets,
            sampling_params=sampling_fields(params, max_tokens, grammar),
            model=model,
            reasoning_ended=reasoning_ended,
            stream=bool(body.stream),
            stream_options=None if options is None else options.model_dump(),
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
        )

    def answer(rendered: Any) -> Response:
        return Response(msgspec.json.encode(rendered), media_type="application/json")

    async def render_chat(body: SamplingFields, chat: PreparedChat, request_id: str, model: str | None) -> Response:
        refuse_if(chat.prompts[0].embeds is not None, "messages", "Messages with 'prompt_embeds' cannot be rendered.")
        special = bool(body.add_special_tokens)
        offsets = await _token_offsets(service, body, chat.answer_format.prompt, chat.token_ids, special)
        ended = chat.answer_format.reasoning_ended
        return answer(render(body, model, request_id, chat.token_ids, chat.params, chat.grammar, offsets, ended))

    @router.post("/v1/chat/completions/render", responses=json_answers(RenderedRequest))
    async def render_chat_completion(body: ChatRequest, request: Request) -> Response:
        """The request that answers a conversation."""
        _refuse_beams(body)
        chat = await prepare_chat(service, body)
        return await render_chat(body, chat, f"chatcmpl-{base_request_id(request, body.request_id)}", body.model)

    @router.post("/v1/responses/render", responses=json_answers(RenderedRequest))
    async def render_response(body: ResponsesRequest) -> Response:
        """The request that makes a response. It cannot continue one, since that may be kept elsewhere."""
        _refuse_beams(body)
        refuse_if(
            body.previous_response_id is not None,
            "previous_response_id",
            "A rendered request cannot continue a response: send the whole conversation as 'input'.",
        )
        return await render_chat(body, await prepare_response(service, body), new_id("resp_"), body.model)

    @router.post("/v1/messages/render", responses=json_answers(RenderedRequest))
    async def render_message(body: MessagesRequest, request: Request) -> Response:
        """The request that answers a conversation in Anthropic's shape."""
        chat = await prepare_message(service, body)
        return await render_chat(body.sampling, chat, f"chatcmpl-{base_request_id(request, None)}", body.model)

    @router.post("/cohere/v2/chat/render", responses=json_answers(RenderedRequest))
    async def render_cohere_chat(body: CohereChatRequest, request: Request) -> Response:
        """The request that answers a conversation in Cohere's shape."""
        chat = await prepare_cohere_chat(service, body)
        return await render_chat(body.sampling, chat, f"chatcmpl-{base_request_id(request, None)}", body.model)

    @router.post("/v1/completions/render", responses=json_answers(list[RenderedRequest]))
    async def render_completion(body: CompletionRequest, request: Request) -> Response:
        """The requests that continue texts, one for each prompt."""
        _refuse_beams(body)
        completion = await prepare_completion(service, body)
        base = f"cmpl-{base_request_id(request, body.request_id)}"
        single = len(completion.prompts) == 1
        rendered = []
        for index, (prompt, text) in enumerate(zip(completion.prompts, completion.texts, strict=True)):
            refuse_if(prompt.embeds is not None, "prompt_embeds", "Prompts with 'prompt_embeds' cannot be rendered.")
            ids = prompt.token_ids
            offsets = await _token_offsets(service, body, text, ids, body.add_special_tokens is not False)
            request_id = base if single else f"{base}-{index}"
            rendered.append(render(body, body.model, request_id, ids, completion.params, completion.grammar, offsets))
        return answer(rendered)

    return router
