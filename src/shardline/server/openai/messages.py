"""The conversation in a request: messages, tools, and how they become a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from shardline.server.errors import bad_request
from shardline.server.openai.body_size import check_template_values
from shardline.server.openai.protocol import refuse_if
from shardline.server.openai.request_model import RequestModel
from shardline.server.openai.tools import MAX_TOOLS, Tool, ToolUse, choose_tools
from shardline.server.service import Service

MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""The most parts of one message."""
_INLINE_MESSAGES = 256
"""The most messages that are converted on the event loop."""


class ContentPart(RequestModel):
    """A part of a message. Only text is supported; other types are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted, but has no effect: prefixes are cached anyway."""
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatMessage(RequestModel):
    """A message of the conversation. It may have all fields of an answer, so that clients can send answers back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it. They do not know the role "developer", so it becomes "system"."""
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        if isinstance(self.content, list):
            message["content"] = [{"type": "text", "text": part.text or part.refusal} for part in self.content]
        if self.reasoning is not None:
            # Templates know only this name.
            message.setdefault("reasoning_content", self.reasoning)
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as a prompt."""

    text: str
    token_ids: list[int]
    tool_use: ToolUse | None
    """None: the answer may not call tools."""


class ConversationFields(RequestModel):
    """The fields that control how messages become a prompt."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        return dict(self.chat_template_kwargs or {})

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
        _check_messages(messages)
        for name, field in self._template_fields(messages, param):
            check_template_values(name, field)
        tool_use = choose_tools(service, self.tools or (), self.tool_choice, self.parallel_tool_calls is not False)
        text, ids = await service.encode_chat(
            await _for_template(messages),
            add_special_tokens=add_special_tokens,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            tools=None if tool_use is None else tool_use.definitions,
            variables=self.template_variables,
            max_tokens=service.llm.max_model_len if max_tokens is None else max_tokens,
            param=param,
        )
        return EncodedChat(text, ids, tool_use)

    def _template_fields(self, messages: Sequence[ChatMessage], param: str) -> list[tuple[str, list[Any]]]:
        """What chat templates may write as JSON, and the names of the fields. `param`: that of `messages`."""
        objects = [(one.tool_calls, one.function_call, one.annotations, one.audio) for one in messages]
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
        reserved = {"messages", "tools", "add_generation_prompt"} & (self.chat_template_kwargs or {}).keys()
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


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            name = f"messages[{index}].content"
            raise bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
        for part in message.content if isinstance(message.content, list) else ():
            if part.type not in ("text", "refusal") or (part.text is None and part.refusal is None):
                raise bad_request(
                    f"messages[{index}] has a content part of type '{part.type}'; this model takes text only.",
                    "messages",
                )
        for call in message.tool_calls or ():
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                name = f"messages[{index}].tool_calls"
                raise bad_request(f"Invalid value for '{name}': every call needs a 'function' with a 'name'.", name)
