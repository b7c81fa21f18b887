"""The messages of a conversation, and how they become a prompt."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from shardline.api.prompt_embeds import Rows, join_parts
from shardline.messages.request import PromptEmbeds
from shardline.server.errors import bad_request, missing_parameter
from shardline.server.json_body import RequestModel, check_template_values
from shardline.server.openai.chat.custom_tools import as_function, as_function_calls
from shardline.server.openai.chat.tools import MAX_TOOLS, Tool, ToolUse, choose_tools
from shardline.server.openai.protocol import refuse_if
from shardline.server.prompts import read_embeds
from shardline.server.service import Service
from shardline.text.chat_template import Conversation

MAX_MESSAGES = 4096
MAX_ROLE_CHARS = 64
MAX_PARTS = 4096
"""The most parts of one message."""

_RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template"}
"""Variables of chat templates that have a field of their own."""

_INLINE_MESSAGES = 256
"""The most messages that are converted on the event loop."""


class ContentPart(RequestModel):
    """A part of a message. Only text and `prompt_embeds` are taken; other types are refused, unknown fields ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str
    text: str | None = None
    data: str | None = None
    """Of `prompt_embeds`: the base64 of a tensor, see CompletionRequest."""
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted, but has no effect: prefixes are cached anyway."""
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatMessage(RequestModel):
    """A message of the conversation. It may have all fields of an answer, so that clients can send answers back.

    Other fields and other roles are the chat template's matter, as in vLLM.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Annotated[str, Field(max_length=MAX_ROLE_CHARS)]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True), AfterValidator(as_function_calls)] | None = None
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
        if not self.tool_calls:
            message.setdefault("content", "")  # an answer may only reason, and templates join texts
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
        _check_messages(messages)
        for name, field in self._template_fields(messages, param):
            check_template_values(name, field)
        messages, rows = await _take_embeds(service, messages, param)
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
        filled, embeds = join_parts([list(rows.values())[-1 - one] if one < 0 else [one] for one in ids])
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


async def _take_embeds(
    service: Service, messages: Sequence[ChatMessage], param: str
) -> tuple[Sequence[ChatMessage], dict[str, Rows]]:
    """The messages with a text that nobody can guess in place of each `prompt_embeds`, and the rows of each text."""
    rows: dict[str, Rows] = {}

    async def take(part: ContentPart) -> ContentPart:
        if part.type != "prompt_embeds":
            return part
        assert part.data is not None
        gap = secrets.token_hex(16)
        rows[gap] = await read_embeds(service, part.data, param)
        return ContentPart(type="text", text=gap)

    taken = []
    for message in messages:
        if isinstance(message.content, list) and any(part.type == "prompt_embeds" for part in message.content):
            message = message.model_copy(update={"content": [await take(part) for part in message.content]})
        taken.append(message)
    return taken, rows


async def _for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them; many are converted on a thread."""
    if len(messages) <= _INLINE_MESSAGES:
        return [message.for_template() for message in messages]
    return await asyncio.to_thread(list, map(ChatMessage.for_template, messages))


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise missing_parameter(f"messages[{index}].content")
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == "prompt_embeds":
                if part.data is None:
                    name = f"messages[{index}].content"
                    raise bad_request(f"A part 'prompt_embeds' of '{name}' needs 'data': the base64 of a tensor.", name)
                continue
            if part.type not in ("text", "refusal"):
                raise bad_request(
                    f"messages[{index}] has a content part of type '{part.type}'; this model takes text only.",
                    "messages",
                )
            if part.text is None and part.refusal is None:
                raise missing_parameter(f"messages[{index}].content[{place}].text")
        for call in message.tool_calls or ():
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                name = f"messages[{index}].tool_calls"
                raise bad_request(f"Invalid value for '{name}': every call needs a 'function' with a 'name'.", name)
