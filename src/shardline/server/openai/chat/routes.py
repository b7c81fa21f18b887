"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.responses import Response

from shardline.sampling_params import SamplingParams
from shardline.server.answer_schema import json_answers
from shardline.server.json_body import StrictRoute
from shardline.server.openai.answer_format import AnswerFormat, make_answer_grammar
from shardline.server.openai.chat.request import ChatRequest
from shardline.server.openai.chat.writer import ChatResponse, ChatWriter
from shardline.server.openai.generation import Generation
from shardline.server.service import Service, new_id
from shardline.server.sse import EventStream


@dataclass(frozen=True)
class PreparedChat:
    """A chat request as the engine takes it."""

    params: SamplingParams
    token_ids: list[int]
    answer_format: AnswerFormat
    """It has the prompt's text."""
    grammar: str
    """Of the answer; empty: it may be any text."""

    async def start(self, service: Service, body: ChatRequest, request_id: str) -> Generation:
        """Admit the request.

        Raises:
            ApiError: see `Generation.start`.
        """
        return await Generation.start(
            service,
            [self.token_ids],
            self.params,
            request_id=request_id,
            prompt_param="messages",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            shown_token_ids=self.answer_format.shown_token_ids,
            grammar=self.grammar,
        )


async def prepare_chat(service: Service, body: ChatRequest) -> PreparedChat:
    """Check a chat request, render its messages, and write the grammar of its answer.

    Raises:
        ApiError: 400, a field is invalid or unsupported; 404, another model is asked for.
    """
    service.require_model(body.model)
    body.check()
    params = body.sampling_params(
        max_tokens=body.token_limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    chat = await body.encode_messages(service, body.messages, add_special_tokens=bool(body.add_special_tokens))
    reasoning = service.chat.reasoning_parser
    if body.separate_reasoning is False and reasoning is not None and not reasoning.template_marks:
        reasoning = None
    answer_format = AnswerFormat(service.require_tokenizer(), chat.text, chat.tool_use, reasoning)
    grammar = await make_answer_grammar(
        answer_format, body.response_format, body.requested_form, service.llm.grammars, service.chat.template_text
    )
    return PreparedChat(params, body.truncate_prompt(chat.token_ids), answer_format, grammar)


def chat_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=json_answers(ChatResponse, streams=True))
    async def create_chat_completion(body: ChatRequest) -> Response:
        """Answer a conversation. With `stream`, the answer is sent as server-sent events."""
        chat = await prepare_chat(service, body)
        response_id = new_id("chatcmpl")
        writer = ChatWriter(service, body, response_id, chat.answer_format)
        generation = await chat.start(service, body, response_id)
        if body.stream:
            return EventStream(writer.write_chunks(generation), generation, body.ignored_headers)
        async with generation:
            [output] = await generation.wait_finished()
            if body.logprobs:  # it may take long
                whole = await asyncio.to_thread(writer.write_whole, output)
            else:
                whole = writer.write_whole(output)
            return Response(whole, headers=body.ignored_headers, media_type="application/json")

    return router
