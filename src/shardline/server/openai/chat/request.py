"""Chat requests, and how the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from shardline.api.prompts import EncodedPrompt
from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel
from shardline.server.openai.answer_form import FORM_NAMES
from shardline.server.openai.answer_format import AnswerFormat, thinking_budget
from shardline.server.openai.answer_parts import check_top_logprobs
from shardline.server.openai.answer_to_chat import PreparedChat, prepare_answer
from shardline.server.openai.chat.conversation import ConversationFields, EncodedChat
from shardline.server.openai.chat.messages import Messages
from shardline.server.openai.protocol import SamplingFields, TokenIds, refuse_if
from shardline.server.prompts import decode_tokens, most_encoded
from shardline.server.service import Service
from shardline.text.chat_messages import text_content

_RENDERED_IDS = "kv_transfer_params.prompt_token_ids"


class TransferParams(RequestModel):
    """What another server hands over with a request. Its other fields are ignored: no KV blocks are moved."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    """The prompt, which the other server has rendered."""


class ChatRequest(ConversationFields, SamplingFields):
    """The body of POST /v1/chat/completions."""

    taken_here: ClassVar[frozenset[str]] = frozenset(
        {"kv_transfer_params", "reasoning_effort", "thinking_token_budget"}
    )

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    # Clients of vLLM send these as text, too.
    logprobs: Annotated[bool, Field(strict=False)] | None = None
    top_logprobs: Annotated[int, Field(ge=-1, strict=False)] | None = None
    include_reasoning: bool | None = None
    """Whether the answer shows the model's reasoning; None: it does."""
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    functions: Any = None
    function_call: str | dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: Any = None
    separate_reasoning: bool | None = None
    """Whether reasoning is split off at all; None: it is, if the server has a parser for it."""
    echo: bool | None = None
    kv_transfer_params: TransferParams | None = None
    return_prompt_text: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """For chat templates that show documents to the model."""

    def check(self) -> None:
        """Check the fields together.

        Raises:
            ApiError: 400, the fields contradict each other or ask for something unsupported.
        """
        self.check_supported()
        if self.top_logprobs and not self.logprobs:
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
        refuse_if(self.web_search_options is not None, "web_search_options", "Web search is not supported.")

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        documents = {} if self.documents is None else {"documents": self.documents}
        return {**documents, **super().template_variables}

    @property
    def answer_role(self) -> str:
        """Whose message the answer is if it continues the last one; empty: the answer is a message of its own."""
        return self.messages[-1].role if self.add_generation_prompt is False else ""

    @property
    def reports_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def echoed_text(self) -> str:
        """The text to repeat before the answer: the last message if `echo` asks for it and its role is the answer's."""
        last = self.messages[-1]
        if not self.echo or last.role != (self.answer_role or "assistant"):
            return ""
        return text_content(last.for_template().get("content"), -1)

    @property
    def rendered_ids(self) -> list[int] | None:
        """The prompt that another server has rendered; None: `messages` are to be rendered, as for `echo`."""
        return None if self.kv_transfer_params is None or self.echo else self.kv_transfer_params.prompt_token_ids

    @property
    def token_limit(self) -> int | None:
        """Maximal number of tokens to generate. None: up to the model's maximum length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


async def prepare_chat(service: Service, body: ChatRequest) -> PreparedChat:
    """Check a chat request, render its messages, and prepare its answer.

    Raises:
        ApiError: 400, a field is invalid or unsupported; 404, another model is asked for.
    """
    service.require_model(body.model)
    body.check()
    if body.top_logprobs is not None:
        check_top_logprobs(service, body.top_logprobs)
    params = body.sampling_params(
        max_tokens=body.token_limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        defaults=service.sampling_defaults,
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
    chat = replace(chat, token_ids=body.truncate_prompt(chat.token_ids, service.llm.model.max_model_len - 1))
    budget = None
    if body.thinking_token_budget is not None:
        tokenizer = service.require_tokenizer()
        budget = thinking_budget(body.thinking_token_budget, service.chat.reasoning_parser, tokenizer)
    param = "messages" if body.rendered_ids is None else _RENDERED_IDS
    may_have_form = not body.model_fields_set.isdisjoint(FORM_NAMES)
    if chat.tool_use is None and reasoning is None and not may_have_form:  # any text is an answer
        return PreparedChat(
            prompts=[EncodedPrompt(chat.token_ids, chat.embeds)],
            params=params,
            param=param,
            answer_format=AnswerFormat(service.require_tokenizer(), chat.text),
        )
    return await prepare_answer(
        service,
        chat,
        params,
        body.response_format,
        reasoning=reasoning,
        with_reasoning=body.include_reasoning is not False,
        max_reasoning_tokens=budget,
        may_reason=_allows_reasoning({**service.config.template_variables, **body.template_variables}),
        requested_form=body.requested_form,
        param=param,
    )


def _allows_reasoning(variables: Mapping[str, Any]) -> bool:
    """Whether the variables of a chat template allow reasoning: none of those that switch it is set, or one is true."""
    switches = [variables[name] for name in ("enable_thinking", "thinking") if variables.get(name) is not None]
    return not switches or any(switches)


async def _encode(service: Service, body: ChatRequest) -> EncodedChat:
    """The prompt: what another server has rendered, or the messages."""
    ids = body.rendered_ids
    if ids is None:
        limit = None if body.truncate_prompt_tokens is None else most_encoded(service)
        special = bool(body.add_special_tokens)
        return await body.encode_messages(service, body.messages, add_special_tokens=special, max_tokens=limit)
    if len(ids) > service.llm.model.max_model_len:
        return EncodedChat("", ids, None)  # the request is refused below
    return EncodedChat(decode_tokens(service, ids), ids, body.choose_tools(service))
