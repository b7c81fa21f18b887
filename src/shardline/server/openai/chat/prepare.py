"""Requests for a conversation's next message, as the engine takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from shardline.api.requests import MixedPrompt
from shardline.messages.request import PromptEmbeds
from shardline.sampling_params import SamplingParams
from shardline.server.openai.answer_format import AnswerFormat, make_answer_grammar
from shardline.server.openai.chat.request import ChatRequest, EncodedChat
from shardline.server.openai.generation import Generation
from shardline.server.openai.protocol import ResponseFormat, refuse_if
from shardline.server.resume import Resume
from shardline.server.service import Service
from shardline.text.reasoning_parsers.base import ReasoningParser

_RENDERED_IDS = "kv_transfer_params.prompt_token_ids"


@dataclass(frozen=True)
class PreparedChat:
    """A chat request as the engine takes it."""

    params: SamplingParams
    token_ids: list[int]
    answer_format: AnswerFormat
    """It has the prompt's text."""
    grammar: str
    """Of the answer; empty: it may be any text."""
    param: str
    """The field of the request with the messages."""
    embeds: PromptEmbeds | None = None
    """Rows in place of some tokens; None: there are none."""

    @property
    def has_form(self) -> bool:
        """Whether the answer cannot be any text."""
        return bool(self.grammar)

    @property
    def prompt(self) -> list[int] | MixedPrompt:
        """The prompt as the engine takes it."""
        if self.embeds is None:
            return self.token_ids
        return {"prompt_token_ids": self.token_ids, "embeds": self.embeds, "prompt": None}

    async def start(
        self, service: Service, request_id: str, *, priority: int, cache_salt: str, resume: Resume | None = None
    ) -> Generation:
        """Admit the request.

        Raises:
            ApiError: see `Generation.start`.
        """
        return await Generation.start(
            service,
            [self.prompt],
            self.params,
            request_id=request_id,
            prompt_param=self.param,
            priority=priority,
            cache_salt=cache_salt,
            shown_token_ids=self.answer_format.shown_token_ids,
            grammar=self.grammar,
            resume=resume,
        )


async def prepare_answer(
    service: Service,
    chat: EncodedChat,
    params: SamplingParams,
    response_format: ResponseFormat | None,
    *,
    reasoning: type[ReasoningParser] | None,
    with_reasoning: bool = True,
    max_reasoning_tokens: int | None = None,
    requested_form: dict[str, Any] | None = None,
    param: str = "messages",
    format_param: str = "response_format",
) -> PreparedChat:
    """What the answer to a conversation may be.

    `reasoning`: how reasoning before the answer is read; None: there is none. `with_reasoning`: whether the client sees
    it; if not, an answer whose form is required begins with that form. `max_reasoning_tokens`: None: any number.
    `requested_form`: `SamplingFields.requested_form`. `param` and `format_param`: the fields of the request that have
    the messages and `response_format`.

    Raises:
        ApiError: 400, a schema, or what a tool takes, cannot be used.
    """
    has_form = requested_form is not None or (response_format is not None and response_format.type != "text")
    if reasoning is not None and not with_reasoning and not reasoning.template_marks:
        reasoning = None if has_form or (chat.tool_use is not None and chat.tool_use.required) else reasoning
    if max_reasoning_tokens is not None and max_reasoning_tokens >= (params.max_tokens or math.inf):
        max_reasoning_tokens = None  # the answer ends before, and needs no grammar
    answer_format = AnswerFormat(service.require_tokenizer(), chat.text, chat.tool_use, reasoning, max_reasoning_tokens)
    grammar = await make_answer_grammar(
        answer_format,
        response_format,
        requested_form,
        service.llm.grammars,
        service.chat.template_text,
        format_param=format_param,
        disable_any_whitespace=service.config.disable_any_whitespace,
    )
    return PreparedChat(params, chat.token_ids, answer_format, grammar, param, chat.embeds)


async def prepare_chat(service: Service, body: ChatRequest) -> PreparedChat:
    """Check a chat request, render its messages, and prepare its answer.

    Raises:
        ApiError: 400, a field is invalid or unsupported; 404, another model is asked for.
    """
    service.require_model(body.model)
    body.check()
    service.check_top_logprobs(body.top_logprobs)
    params = body.sampling_params(
        max_tokens=body.token_limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        defaults=service.llm.model.sampling_defaults,
    )
    chat = await _encode(service, body)
    refuse_if(
        chat.embeds is not None and body.truncate_prompt_tokens is not None,
        "truncate_prompt_tokens",
        "'truncate_prompt_tokens' is not compatible with prompt embeds.",
    )
    reasoning = service.chat.reasoning_parser
    if body.separate_reasoning is False and reasoning is not None and not reasoning.template_marks:
        reasoning = None
    if body.include_reasoning is False and body.has_form:
        reasoning = None  # as in vLLM, a constrained answer that must not show reasoning has none
    return await prepare_answer(
        service,
        replace(chat, token_ids=body.truncate_prompt(chat.token_ids, service.llm.model.max_model_len - 1)),
        params,
        body.response_format,
        reasoning=reasoning,
        with_reasoning=body.include_reasoning is not False,
        max_reasoning_tokens=body.max_reasoning_tokens(service.chat.reasoning_parser is not None),
        requested_form=body.requested_form,
        param="messages" if body.rendered_ids is None else _RENDERED_IDS,
    )


async def _encode(service: Service, body: ChatRequest) -> EncodedChat:
    """The prompt: what another server has rendered, or the messages."""
    ids = body.rendered_ids
    if ids is None:
        limit = None if body.truncate_prompt_tokens is None else service.most_encoded
        special = bool(body.add_special_tokens)
        return await body.encode_messages(service, body.messages, add_special_tokens=special, max_tokens=limit)
    if len(ids) > service.llm.model.max_model_len:
        return EncodedChat("", ids, None)  # the request is refused below
    return EncodedChat(service.decode_tokens(ids, skip_special_tokens=False), ids, body.choose_tools(service))
