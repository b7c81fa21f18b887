"""Requests of POST /cohere/v2/chat: their fields, and their messages as chat messages."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from shardline.server.errors import require_value
from shardline.server.json_body import RequestModel
from shardline.server.openai.answer_form import ResponseFormat
from shardline.server.openai.chat.conversation import ConversationFields
from shardline.server.openai.chat.messages import MAX_MESSAGES, MAX_PARTS, ChatMessage
from shardline.server.openai.chat.tools import MAX_TOOLS, FunctionDefinition, Tool
from shardline.server.openai.protocol import SamplingFields, Seed, refuse_if


class _Lenient(RequestModel):
    """An object whose unknown fields are ignored, as in vLLM."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Document(_Lenient):
    """What the model can read, in a request or as the result of a tool."""

    id: str | None = None
    data: str | dict[str, Any]


class Block(_Lenient):
    """A block of a message's content; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    document: Document | None = None


class Message(_Lenient):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer", "tool"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_plan: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def as_chat_message(self, place: str) -> ChatMessage:
        """The message as chats have it; `place`: its field of the request, for errors.

        Raises:
            ApiError: 400, a block lacks a field, or has a type that is not supported.
        """
        reasoning: list[str] = []
        content: Any = self.content
        if isinstance(content, list):
            texts = []
            for index, block in enumerate(content):
                if block.type == "thinking" and self.role == "assistant":
                    reasoning.append(block.thinking or "")
                else:
                    texts.append(_text(block, self.role, f"{place}[{index}]"))
            # As in vLLM: results of tools stay apart, and all else is one text.
            content = "\n".join(texts) if self.role == "tool" else "".join(texts)
        if self.tool_plan:
            reasoning.append(self.tool_plan)
        return ChatMessage(
            role=self.role,
            content=content,
            tool_calls=self.tool_calls or None,
            tool_call_id=self.tool_call_id,
            reasoning="".join(reasoning) or None,
        )


class ToolDefinition(_Lenient):
    """A tool that the client runs."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class AnswerForm(_Lenient):
    """The form of the answer."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None
    """Of a JSON object; None: any."""


class Thinking(_Lenient):
    """Whether the model reasons before it answers, and with how many tokens at most."""

    type: Literal["enabled", "disabled"]
    token_budget: Annotated[int, Field(ge=0)] | None = None


class CohereChatRequest(_Lenient):
    """The body of POST /cohere/v2/chat."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: Annotated[list[str | Document], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    """For chat templates that show documents to the model, as are the next two."""
    citation_options: dict[str, Any] | None = None
    safety_mode: str | None = None
    response_format: AnswerForm | None = None
    max_tokens: int | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: float | None = None
    seed: Seed | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: int | None = None
    p: float | None = None
    logprobs: bool | None = None
    thinking: Thinking | None = None
    priority: int | None = None
    watermarking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    @property
    def conversation_fields(self) -> ConversationFields:
        """The fields that control how messages become a prompt."""
        return ConversationFields(
            tools=[self._read_tool(tool.function) for tool in self.tools or ()] or None,
            tool_choice=None if self.tool_choice is None else self.tool_choice.lower(),
            chat_template_kwargs={**self._template_variables(), **(self.chat_template_kwargs or {})} or None,
        )

    def chat_messages(self) -> list[ChatMessage]:
        """The conversation as chat messages.

        Raises:
            ApiError: 400, a block lacks a field, or has a type that is not supported.
        """
        return [message.as_chat_message(f"messages[{index}].content") for index, message in enumerate(self.messages)]

    @property
    def sampling(self) -> SamplingFields:
        """The fields that generating endpoints have in common."""
        names = (
            "stream", "temperature", "seed", "frequency_penalty", "presence_penalty", "priority", "watermarking",
            "cache_salt", "model",
        )  # fmt: skip
        same = {name: getattr(self, name) for name in names}
        return SamplingFields(stop=self.stop_sequences or None, top_k=self.k, top_p=self.p, **same)

    @property
    def max_reasoning_tokens(self) -> int | None:
        """The budget of reasoning; None: there is none."""
        return None if self.thinking is None or self.thinking.type != "enabled" else self.thinking.token_budget

    @property
    def answer_form(self) -> ResponseFormat | None:
        """The form of the answer as chats have it."""
        form = self.response_format
        if form is None or form.type == "text" or form.json_schema is None:
            return None if form is None else ResponseFormat(type=form.type)
        return ResponseFormat(type="json_schema", json_schema={"schema": form.json_schema})

    def _read_tool(self, function: FunctionDefinition) -> Tool:
        return Tool(function=function.model_copy(update={"strict": True}) if self.strict_tools else function)

    def _template_variables(self) -> dict[str, Any]:
        """What chat templates may read, under the names that they know."""
        variables: dict[str, Any] = {}
        if self.documents:
            variables["documents"] = [_document(one, index) for index, one in enumerate(self.documents)]
        if self.safety_mode is not None:
            variables["safety_mode"] = self.safety_mode.lower()
        if self.citation_options is not None:
            variables["citation_options"] = self.citation_options
        if self.thinking is not None:
            enabled = self.thinking.type == "enabled"
            variables |= {"enable_thinking": enabled, "thinking": enabled, "reasoning": enabled}
        return variables


def _document(document: str | Document, index: int) -> dict[str, Any]:
    if isinstance(document, str):
        document = Document(data=document)
    data = {"text": document.data} if isinstance(document.data, str) else document.data
    return {"id": document.id or f"doc_{index}", "data": data}


def _text(block: Block, role: str, place: str) -> str:
    if block.type == "document" and role == "tool":
        document = require_value(block.document, f"{place}.document")
        return json.dumps(document.model_dump(exclude_none=True), ensure_ascii=False)
    refuse_if(
        block.type != "text",
        place,
        f"'{place}' is a block of the type '{block.type}'; this model takes text only.",
    )
    return require_value(block.text, f"{place}.text")
