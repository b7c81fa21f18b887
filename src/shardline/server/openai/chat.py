"""POST /v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from shardline.server.answer_schema import json_answers
from shardline.server.errors import bad_request
from shardline.server.event_stream import EventStream
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.answer_grammar import make_answer_grammar
from shardline.server.openai.chat_response import ChatResponse
from shardline.server.openai.chat_writer import ChatWriter
from shardline.server.openai.generation import Generation
from shardline.server.openai.messages import ConversationFields, Messages
from shardline.server.openai.protocol import SamplingFields, refuse_if
from shardline.server.openai.strict_json import StrictRoute
from shardline.server.service import Service, new_id


class ChatRequest(ConversationFields, SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include_reasoning: bool | None = None
    """Whether the answer shows the model's reasoning; None: it does."""
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    functions: Any = None
    function_call: str | dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: Any = None
    chat_template: str | None = None
    separate_reasoning: bool | None = None
    """Whether reasoning is split off at all; None: it is, if the server has a parser for it."""
    echo: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """For chat templates that show documents to the model."""

    def check(self) -> None:
        """Check the fields together.

        Raises:
            ApiError: 400, the fields contradict each other or ask for something unsupported.
        """
        self.check_supported()
        refuse_if(bool(self.echo), "echo", "'echo' is not supported for chats: use /v1/completions.")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request(
                "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", "top_logprobs"
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("Set 'max_completion_tokens' or 'max_tokens', not both.", "max_tokens")
        refuse_if(self.modalities not in (None, ["text"]), "modalities", "Only the modality 'text' is supported.")
        refuse_if(self.audio is not None, "audio", "Audio is not supported.")
        refuse_if(bool(self.functions), "functions", "'functions' is not supported: use 'tools'.")
        refuse_if(
            self.function_call not in (None, "none", "auto"),
            "function_call",
            "'function_call' is not supported: use 'tool_choice'.",
        )
        refuse_if(self.moderation is not None, "moderation", "Moderation is not supported.")
        refuse_if(
            self.chat_template is not None,
            "chat_template",
            "A request cannot bring a chat template: start the server with --chat-template.",
        )
        refuse_if(self.web_search_options is not None, "web_search_options", "Web search is not supported.")

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        documents = {} if self.documents is None else {"documents": self.documents}
        return {**documents, **super().template_variables}

    @property
    def token_limit(self) -> int | None:
        """Maximal number of tokens to generate. None: up to the model's maximum length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def chat_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=json_answers(ChatResponse, streams=True))
    async def create_chat_completion(body: ChatRequest) -> Response:
        """Answer a conversation. With `stream`, the answer is sent as server-sent events."""
        service.require_model(body.model)
        body.check()
        params = body.sampling_params(
            max_tokens=body.token_limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None
        )
        response_id = new_id("chatcmpl")
        chat = await body.encode_messages(service, body.messages, add_special_tokens=bool(body.add_special_tokens))
        reasoning = service.chat.reasoning_parser
        if body.separate_reasoning is False and reasoning is not None and not reasoning.template_marks:
            reasoning = None
        answer_format = AnswerFormat(service.require_tokenizer(), chat.text, chat.tool_use, reasoning)
        writer = ChatWriter(service, body, response_id, answer_format)
        grammar = await make_answer_grammar(
            answer_format,
            body.response_format,
            body.requested_form,
            service.llm.grammars,
            service.chat.template_text,
        )
        generation = await Generation.start(
            service,
            [body.truncate_prompt(chat.token_ids)],
            params,
            request_id=response_id,
            prompt_param="messages",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            shown_token_ids=answer_format.shown_token_ids,
            grammar=grammar,
        )
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
