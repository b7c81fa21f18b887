"""What the answer to a conversation may be, for all endpoints that have conversations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardline.api.prompts import EncodedPrompt
from shardline.sampling_params import SamplingParams
from shardline.server.openai.answer_form import ResponseFormat
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.answer_grammar import make_answer_grammar
from shardline.server.openai.chat.conversation import EncodedChat
from shardline.server.openai.generation import Prepared
from shardline.server.service import Service
from shardline.text.reasoning_parsers.base import ReasoningParser


@dataclass(frozen=True, kw_only=True)
class PreparedChat(Prepared):
    """A chat request as the engine takes it."""

    answer_format: AnswerFormat
    """It has the prompt's text."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt's."""
        return self.prompts[0].token_ids


async def prepare_answer(
    service: Service,
    chat: EncodedChat,
    params: SamplingParams,
    response_format: ResponseFormat | None,
    *,
    reasoning: type[ReasoningParser] | None,
    with_reasoning: bool = True,
    max_reasoning_tokens: int | None = None,
    may_reason: bool = False,
    requested_form: dict[str, Any] | None = None,
    param: str = "messages",
    format_param: str = "response_format",
) -> PreparedChat:
    """What the answer to a conversation may be.

    `reasoning`: how reasoning before the answer is read; None: there is none. `with_reasoning`: whether the client sees
    it; if not, an answer whose form is required begins with that form. `max_reasoning_tokens`: None: any number.
    `may_reason`: whether an answer that has no required form may begin with reasoning without a mark.
    `requested_form`: `FormFields.requested_form`. `param` and `format_param`: the fields of the request that have
    the messages and `response_format`.

    Raises:
        ApiError: 400, a schema, or what a tool takes, cannot be used.
    """
    has_form = requested_form is not None or (response_format is not None and response_format.type != "text")
    must_fit = has_form or (chat.tool_use is not None and chat.tool_use.required)
    if must_fit and reasoning is not None and not with_reasoning and not reasoning.template_marks:
        reasoning = None
    if max_reasoning_tokens is not None and max_reasoning_tokens >= (params.max_tokens or math.inf):
        max_reasoning_tokens = None  # the answer ends before, and needs no grammar
    is_free = may_reason and not must_fit and max_reasoning_tokens is None
    answer_format = AnswerFormat(
        service.require_tokenizer(), chat.text, chat.tool_use, reasoning, max_reasoning_tokens, is_free
    )
    grammar, is_plain = "", chat.tool_use is None and reasoning is None
    if has_form or not is_plain:
        grammar = await make_answer_grammar(
            answer_format,
            response_format,
            requested_form,
            service.llm.grammars,
            service.chat.template_text,
            format_param=format_param,
            disable_any_whitespace=service.config.disable_any_whitespace,
        )
    shown = frozenset() if is_plain else answer_format.shown_token_ids
    return PreparedChat(
        prompts=[EncodedPrompt(chat.token_ids, chat.embeds)],
        params=params,
        param=param,
        grammar=grammar,
        shown_token_ids=shown,
        answer_format=answer_format,
    )
