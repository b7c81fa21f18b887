"""The output items of a response, the response itself, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shardline.server.openai.logprobs import ChatLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of the model's reasoning."""

    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message to the user."""

    id: str
    role: str = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model wrote before its answer."""

    id: str
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    status: Status = "in_progress"
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """How many generated tokens are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Number of tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. The fields after `usage` repeat the request."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    system_fingerprint: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    background: bool = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    user: str | None


class Event(msgspec.Struct, kw_only=True, frozen=True):
    """An event of a stream; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    item: OutputItem | msgspec.UnsetType = msgspec.UNSET
    part: OutputText | ReasoningText | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatLogprob] | msgspec.UnsetType = msgspec.UNSET
