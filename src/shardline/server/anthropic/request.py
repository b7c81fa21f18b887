"""Requests of POST /v1/messages: their fields, and their blocks as chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from shardline.server.errors import require_value
from shardline.server.json_body import RequestModel
from shardline.server.openai.answer_form import ResponseFormat
from shardline.server.openai.chat.conversation import ConversationFields, read_effort
from shardline.server.openai.chat.messages import MAX_MESSAGES, MAX_PARTS, ChatMessage
from shardline.server.openai.chat.tools import MAX_TOOLS, FunctionDefinition, Tool
from shardline.server.openai.protocol import SamplingFields, Seed, refuse_if
from shardline.server.resume import read_resume

_BILLING = "x-anthropic-billing-header"
"""Begins a block of coding agents that differs with each request: in a prompt, it would defeat the prefix cache."""


class _Lenient(RequestModel):
    """An object whose unknown fields are ignored: agents send new ones often."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Block(_Lenient):
    """A block of a message's content; which fields it has depends on its type."""

    type: str
    text: str | None = None
    # tool_use
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    # tool_result
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    # thinking
    thinking: str | None = None


Content = str | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class Message(_Lenient):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolDefinition(_Lenient):
    """A tool. Tools that Anthropic runs have a type and no schema; they are refused."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(_Lenient):
    """Whether the answer must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(_Lenient):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Lenient):
    """What the answer must be like."""

    effort: str | None = None
    format: OutputFormat | None = None


class Thinking(_Lenient):
    """Whether the model reasons before it answers, and with how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class PromptFields(_Lenient):
    """The body of POST /v1/messages/count_tokens: what becomes the prompt."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Content | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """What `output_config.format` was called at first."""
    mcp_servers: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_fields(self) -> ConversationFields:
        """The fields that control how messages become a prompt.

        Raises:
            ApiError: 400, a tool is not one that clients run.
        """
        refuse_if(bool(self.mcp_servers), "mcp_servers", "Only tools that the client runs are supported: use 'tools'.")
        choice = self.tool_choice
        kinds: dict[str, str | dict[str, Any]] = {"auto": "auto", "any": "required", "none": "none"}
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is not None and self.thinking.type != "adaptive":
            enabled = self.thinking.type == "enabled"
            variables = {"enable_thinking": enabled, "thinking": enabled, **variables}
        effort = None if self.output_config is None else self.output_config.effort
        return ConversationFields(
            tools=[_read_tool(tool, index) for index, tool in enumerate(self.tools or ())] or None,
            tool_choice=None if choice is None else kinds.get(choice.type) or _named_tool(choice.name),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
            chat_template_kwargs=variables or None,
            reasoning_effort=read_effort(effort, "output_config.effort"),
        )

    @property
    def has_inline_system(self) -> bool:
        """Whether a message of the system stands among the others, which some chat templates refuse."""
        return any(message.role == "system" for message in self.messages)

    def chat_messages(self, *, merge_system: bool = False) -> list[ChatMessage]:
        """The conversation as chat messages; `merge_system`: all that the system says stands at the beginning.

        Raises:
            ApiError: 400, a block lacks a field, or has a type that is not supported.
        """
        system = list(_system_texts(self.system, "system"))
        messages: list[ChatMessage] = []
        for index, message in enumerate(self.messages):
            place = f"messages[{index}].content"
            if message.role == "system":
                texts = list(_system_texts(message.content, place))
                if merge_system:
                    system += texts
                elif texts:
                    messages.append(_message("system", "".join(texts)))
            elif isinstance(message.content, str):
                messages.append(_message(message.role, message.content))
            elif message.role == "assistant":
                messages.append(_read_answer(message.content, place))
            else:
                messages += _read_turn(message.content, place)
        return [_message("system", "".join(system)), *messages] if system else messages


class MessagesRequest(PromptFields):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    seed: Seed | None = None
    receipt: bool | None = None
    """See `SamplingFields`."""
    resume: Annotated[Any, BeforeValidator(read_resume)] = None
    """As in `SamplingFields`."""

    @property
    def sampling(self) -> SamplingFields:
        """The fields that generating endpoints have in common."""
        names = (
            "stream",
            "temperature",
            "top_p",
            "top_k",
            "cache_salt",
            "priority",
            "seed",
            "receipt",
            "model",
            "resume",
        )
        return SamplingFields(stop=self.stop_sequences or None, **{name: getattr(self, name) for name in names})

    @property
    def max_reasoning_tokens(self) -> int | None:
        """The budget of reasoning; None: there is none."""
        thinking = self.thinking
        return None if thinking is None or thinking.type != "enabled" else thinking.budget_tokens

    @property
    def response_format(self) -> ResponseFormat | None:
        """The form of the answer as chats have it."""
        wanted = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        return None if wanted is None else ResponseFormat(type=wanted.type, json_schema={"schema": wanted.schema_})


def _read_tool(tool: ToolDefinition, index: int) -> Tool:
    refuse_if(
        tool.type not in (None, "custom") or tool.input_schema is None,
        f"tools[{index}]",
        f"'tools[{index}]' has no 'input_schema'; only tools that the client runs are supported.",
    )
    schema = {"type": "object", **(tool.input_schema or {})}
    definition = FunctionDefinition(name=tool.name, description=tool.description, parameters=schema)
    return Tool(type="function", function=definition)


def _named_tool(name: str | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": require_value(name, "tool_choice.name")}}


def _message(role: str, content: str, **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **fields)


def _system_texts(content: Content | None, place: str) -> Iterable[str]:
    """What the system says, without the blocks that say for whom a request is billed."""
    if content is None:
        return
    for text in (
        [content]
        if isinstance(content, str)
        else (_text(block, f"{place}[{index}]") for index, block in enumerate(content))
    ):
        if text and not text.startswith(_BILLING):
            yield text


def _read_answer(blocks: Sequence[Block], place: str) -> ChatMessage:
    """A message of the assistant: its reasoning, its text and its calls."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            continue  # nobody but Anthropic can read it
        elif block.type == "tool_use":
            function = {"name": require_value(block.name, f"{at}.name"), "arguments": json.dumps(block.input or {})}
            calls.append({"id": require_value(block.id, f"{at}.id"), "type": "function", "function": function})
        else:
            texts.append(_text(block, at))
    fields = {"tool_calls": calls or None, "reasoning": "".join(reasoning) or None}
    return _message("assistant", "".join(texts), **fields)


def _read_turn(blocks: Sequence[Block], place: str) -> list[ChatMessage]:
    """A message of the user: the results of tools, and what the user says."""
    results: list[ChatMessage] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        if block.type != "tool_result":
            texts.append(_text(block, at))
            continue
        content = block.content or ""
        if not isinstance(content, str):
            content = "".join(_text(part, f"{at}.content[{number}]") for number, part in enumerate(content))
        results.append(_message("tool", content, tool_call_id=require_value(block.tool_use_id, f"{at}.tool_use_id")))
    return [*results, _message("user", "\n".join(texts))] if texts or not results else results


def _text(block: Block, place: str) -> str:
    refuse_if(
        block.type != "text",
        place,
        f"'{place}' is a block of the type '{block.type}'; this model takes text only.",
    )
    return require_value(block.text, f"{place}.text")
