"""How the messages of a conversation become a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Field

from shardline.api.prompt_embeds import Rows
from shardline.messages.request import PromptEmbeds
from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel, check_template_values
from shardline.server.openai.chat.custom_tools import as_function
from shardline.server.openai.chat.message_embeds import fill_gaps, take_embeds
from shardline.server.openai.chat.messages import ChatMessage, check_messages
from shardline.server.openai.chat.tools import MAX_TOOLS, Tool, ToolUse, choose_tools
from shardline.server.openai.protocol import refuse_if
from shardline.server.service import Service
from shardline.text.chat_template import Conversation

_RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template"}
"""Variables of chat templates that have a field of their own."""

_INLINE_MESSAGES = 256
"""The most messages that are converted on the event loop."""


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as a prompt."""

    text: str
    token_ids: list[int]
    tool_use: ToolUse | None
    """None: the answer may not call tools."""
    embeds: PromptEmbeds | None = None
    """Rows in place of some tokens; None: there are none."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def read_effort(value: Any, param: str) -> Effort | None:
    """An effort of reasoning, or None.

    Raises:
        ApiError: 400, it is none of those that there are.
    """
    for effort in get_args(Effort):
        if value == effort:
            return cast("Effort", effort)
    if value is not None:
        raise bad_request(f"Invalid value for '{param}': use {', '.join(get_args(Effort))}.", param)
    return None


class ConversationFields(RequestModel):
    """The fields that control how messages become a prompt."""

    chat_template: str | None = None
    """A template of this request's own, in jinja; it needs --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    """For chat templates that know it; "none" asks them not to think."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: (
        Annotated[list[Annotated[Tool, BeforeValidator(as_function)]], Field(max_length=MAX_TOOLS, fail_fast=True)]
        | None
    ) = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        effort = self.reasoning_effort
        thinks = effort != "none"
        asked = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        return {**asked, **(self.chat_template_kwargs or {})}

    def choose_tools(self, service: Service) -> ToolUse | None:
        """What the answer may call.

        Raises:
            ApiError: 400, `tools` and `tool_choice` do not fit each other.
        """
        if not self.tools and self.tool_choice is None:
            return None
        return choose_tools(service, self.tools or (), self.tool_choice, self.parallel_tool_calls is not False)

    async def encode_messages(
        self,
        service: Service,
        messages: Sequence[ChatMessage],
        add_special_tokens: bool,
        *,
        max_tokens: int | None = None,
        param: str = "messages",
    ) -> EncodedChat:
        """The prompt of `messages`.

        `max_tokens`: longer prompts are refused before they are encoded; None: those longer than the model's length.
        `param`: the field of the request that had the messages.

        Raises:
            ApiError: 400, a field is not supported, or the model's template refuses the messages.
        """
        self._check_options(messages)
        refuse_if(
            self.chat_template is not None and not service.config.trust_request_chat_template,
            "chat_template",
            "A request may bring a chat template only if the server is started with --trust-request-chat-template.",
        )
        check_messages(messages)
        for name, field in self._template_fields(messages, param):
            check_template_values(name, field)
        rows: dict[str, Rows] = {}
        if any(isinstance(message.content, list) for message in messages):
            messages, rows = await take_embeds(service, messages, param)
        tool_use = self.choose_tools(service)
        offered = [] if self.tool_choice == "none" else self.tools or []
        chat = Conversation(
            await _for_template(messages),
            [tool.for_template() for tool in offered] or None,
            {**service.config.template_variables, **self.template_variables},
            self.add_generation_prompt is not False,
            bool(self.continue_final_message),
            add_special_tokens,
            self.chat_template,
            tuple(rows),
        )
        limit = service.llm.model.max_model_len if max_tokens is None else max_tokens
        text, ids = await service.encode_chat(chat, max_tokens=limit, param=param)
        if not rows:
            return EncodedChat(text, ids, tool_use)
        filled, embeds = fill_gaps(ids, list(rows.values()))
        return EncodedChat(text, filled, tool_use, embeds)

    def _template_fields(self, messages: Sequence[ChatMessage], param: str) -> list[tuple[str, list[Any]]]:
        """What chat templates may write as JSON, and the names of the fields. `param`: that of `messages`."""
        objects = [(m.tool_calls, m.function_call, m.annotations, m.audio, m.model_extra or None) for m in messages]
        return [
            (param, [value for values in objects for value in values if value is not None]),
            ("tools", [tool.function.parameters or {} for tool in self.tools or ()]),
            ("documents", [self.template_variables.get("documents") or []]),
            ("chat_template_kwargs", [self.chat_template_kwargs or {}]),
        ]

    def _check_options(self, messages: Sequence[ChatMessage]) -> None:
        refuse_if(
            bool(self.continue_final_message) and self.add_generation_prompt is True,
            "continue_final_message",
            "'continue_final_message' and 'add_generation_prompt' exclude each other: set one of them.",
        )
        refuse_if(
            bool(self.continue_final_message) and messages[-1].role != "assistant",
            "continue_final_message",
            "'continue_final_message' needs a last message of the role 'assistant'.",
        )
        reserved = _RESERVED & (self.chat_template_kwargs or {}).keys()
        if reserved:
            raise bad_request(
                f"'chat_template_kwargs' must not set '{sorted(reserved)[0]}'; there is a field of that name.",
                "chat_template_kwargs",
            )


async def _for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them; many are converted on a thread."""
    if len(messages) <= _INLINE_MESSAGES:
        return [message.for_template() for message in messages]
    return await asyncio.to_thread(list, map(ChatMessage.for_template, messages))
