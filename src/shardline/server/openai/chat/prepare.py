"""Requests for a conversation's next message, as the engine takes them."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.sampling_params import SamplingParams
from shardline.server.openai.answer_format import AnswerFormat, make_answer_grammar
from shardline.server.openai.chat.request import ChatRequest
from shardline.server.openai.generation import Generation
from shardline.server.openai.protocol import SamplingFields
from shardline.server.service import Service


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

    async def start(self, service: Service, body: SamplingFields, request_id: str) -> Generation:
        """Admit the request.

        Raises:
            ApiError: see `Generation.start`.
        """
        return await Generation.start(
            service,
            [self.token_ids],
            self.params,
            request_id=request_id,
            prompt_param=self.param,
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
    return PreparedChat(params, body.truncate_prompt(chat.token_ids), answer_format, grammar, "messages")
