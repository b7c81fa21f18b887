"""Writes Anthropic's messages, as a whole or in events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from shardline.api.outputs import RequestOutput
from shardline.receipts.receipt import Receipt
from shardline.server.openai.block_writer import BlockWriter
from shardline.server.sse import Events


class MessageUsage(msgspec.Struct, frozen=True):
    """Number of tokens. Those of the prompt are the sum of the first, the third and the last."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    """Tokens of the prompt that the prefix cache keeps from now on."""
    cache_read_input_tokens: int = 0


class ContentBlock(msgspec.Struct, kw_only=True):
    """A block of the answer: text, thinking or a call."""

    type: str
    text: str | msgspec.UnsetType = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    signature: str | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    input: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class MessageObject(msgspec.Struct, kw_only=True):
    """The answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    receipt: Receipt | msgspec.UnsetType = msgspec.UNSET


class ErrorText(BaseModel):
    """What went wrong, for /openapi.json."""

    type: str
    message: str


class MessageError(BaseModel):
    """The answer to a request that failed."""

    type: str
    error: ErrorText


@dataclass
class MessageWriter(BlockWriter):
    """Writes the answer to one request.

    Args:
        cached_block: tokens in a block of the prefix cache; None: there is no cache.
    """

    message_id: str
    model: str
    cached_block: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._blocks: list[ContentBlock] = []
        self._arguments = ""
        """Of the last block, if it is a call."""
        self._is_open = False

    def write_whole(self, output: RequestOutput) -> bytes:
        """The JSON of the whole answer."""
        self._add_output(output)
        return msgspec.json.encode(self._message(output))

    def write_events(self, output: RequestOutput) -> Events:
        """The events of a stream, in Anthropic's order; `output`: that of the request, which has not begun."""
        usage = MessageUsage(len(output.prompt_token_ids), 0)
        start = MessageObject(id=self.message_id, model=self.model, usage=usage)
        self._event("message_start", message=start)
        while (update := (yield self._take_events())) is not None:
            self._add_output(update[1])
        ended = self._message(output)
        delta = {"stop_reason": ended.stop_reason, "stop_sequence": ended.stop_sequence}
        receipt = {} if ended.receipt is msgspec.UNSET else {"receipt": ended.receipt}
        self._event("message_delta", delta=delta, usage=ended.usage, **receipt)
        self._event("message_stop")
        yield self._take_events()

    def _event(self, kind: str, **fields: Any) -> None:
        data = msgspec.json.encode({"type": kind, **fields})
        self._events.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")

    def _add_content(self, kind: Literal["thinking", "text"], text: str) -> None:
        if not self._is_open or self._blocks[-1].type != kind:
            self._end_block()
            fields: dict[str, Any] = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            self._begin_block(ContentBlock(type=kind, **fields))
        setattr(self._blocks[-1], kind, getattr(self._blocks[-1], kind) + text)
        self._add_delta({"type": f"{kind}_delta", kind: text})

    def _begin_call(self, name: str) -> None:
        self._begin_block(ContentBlock(type="tool_use", id=self._parser.new_call_id(), name=name, input={}))

    def _add_arguments(self, text: str) -> None:
        self._arguments += text
        self._add_delta({"type": "input_json_delta", "partial_json": text})

    def _begin_block(self, block: ContentBlock) -> None:
        self._blocks.append(block)
        self._is_open = True
        self._event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _add_delta(self, delta: dict[str, str]) -> None:
        self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _end_block(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._blocks[-1].type == "tool_use":
            self._blocks[-1].input = _as_object(self._arguments)
            self._arguments = ""
        self._event("content_block_stop", index=len(self._blocks) - 1)

    def _message(self, output: RequestOutput) -> MessageObject:
        choice = output.outputs[0]
        reason, sequence = "end_turn", None
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif self._parser.has_calls:
            reason = "tool_use"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        num_prompt, num_read = len(output.prompt_token_ids), output.num_cached_tokens
        num_kept = 0 if self.cached_block is None else num_prompt // self.cached_block * self.cached_block
        created = max(0, num_kept - num_read)
        return MessageObject(
            id=self.message_id,
            model=self.model,
            content=self._blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=MessageUsage(num_prompt - num_read - created, len(choice.token_ids), created, num_read),
            receipt=choice.receipt or msgspec.UNSET,
        )


def _as_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call. A call that was cut has none that can be read."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
