"""What chat answers look like to clients, as a whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shardline.api.logprobs import Logprob
from shardline.api.outputs import RequestOutput
from shardline.receipts.receipt import Receipt
from shardline.server.openai.answer_parts import ChatLogprobs, Usage


class FunctionCall(msgspec.Struct, kw_only=True, frozen=True):
    """The called function; in a chunk, what is new in it."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str
    """JSON text."""


class CustomCall(msgspec.Struct, kw_only=True, frozen=True):
    """The called custom tool; in a chunk, what is new in it."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    input: str


class ToolCall(msgspec.Struct, kw_only=True, frozen=True):
    """A tool call; in a chunk, what is new in it. `index` is the number of the call, in chunks only."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: FunctionCall | msgspec.UnsetType = msgspec.UNSET
    custom: CustomCall | msgspec.UnsetType = msgspec.UNSET


class AssistantMessage(msgspec.Struct, kw_only=True, frozen=True):
    """The message of a whole answer."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    """The same as `reasoning`, under the name that older clients know."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice: `message` in a whole answer, `delta` in a chunk. The digests are there only on request."""

    index: int
    message: AssistantMessage | msgspec.UnsetType = msgspec.UNSET
    delta: ChatDelta | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    logits_digests: list[str] | msgspec.UnsetType = msgspec.UNSET
    receipt: Receipt | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The whole answer, or a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    service_tier: msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: list[dict[int, Logprob] | None] | msgspec.UnsetType | None = msgspec.UNSET
    metrics: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def whole_fields(output: RequestOutput, prompt_text: str | None) -> dict[str, Any]:
    """The fields that only whole answers have."""
    return {
        "prompt_logprobs": output.prompt_logprobs,
        "prompt_text": prompt_text,
        "service_tier": None,
        "kv_transfer_params": None,
    }
