"""Writes Anthropic's messages, as a whole or in events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel

from shardline.api.outputs import RequestOutput
from shardline.receipts.receipt import Receipt
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.generation import SentChoice
from shardline.server.sse import Events
from shardline.text.tool_parsers.base import AnswerDelta, CallDelta


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


def _event(kind: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


@dataclass
class MessageWriter:
    """Writes the answer to one request.

    Args:
        cached_block: tokens in a block of the prefix cache; None: there is no cache.
    """

    message_id: str
    model: str
    answer_format: AnswerFormat
    cached_block: int | None

    def __post_init__(self) -> None:
        self._parser = self.answer_format.make_parser()
        self._sent = SentChoice()
        self._blocks: list[ContentBlock] = []
        self._arguments = ""
        """Of the last block, if it is a call."""
        self._is_open = False
        self._events: list[bytes] = []

    def write_whole(self, output: RequestOutput) -> bytes:
        """The JSON of the whole answer."""
        self._add_output(output)
        return msgspec.json.encode(self._message(output))

    def write_events(self, output: RequestOutput) -> Events:
        """The events of a stream, in Anthropic's order; `output`: that of the request, which has not begun."""
        usage = MessageUsage(len(output.prompt_token_ids), 0)
        start = MessageObject(id=self.message_id, model=self.model, usage=usage)
        self._events.append(_event("message_start", message=start))
        while (update := (yield self._take_events())) is not None:
            self._add_output(update[1])
        ended = self._message(output)
        delta = {"stop_reason": ended.stop_reason, "stop_sequence": ended.stop_sequence}
        receipt = {} if ended.receipt is msgspec.UNSET else {"receipt": ended.receipt}
        self._events += [_event("message_delta", delta=delta, usage=ended.usage, **receipt), _event("message_stop")]
        yield self._take_events()

    def _take_events(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    def _add_output(self, output: RequestOutput) -> None:
        delta = self._sent.take_delta(output.outputs[0], tokens_matter=False)
        if delta is None:
            return
        self._add_answer(self._parser.add_text(delta.text))
        if delta.finish_reason is not None:
            self._add_answer(self._parser.end_text(cut=delta.finish_reason != "stop"))
            self._end_block()

    def _add_answer(self, answer: AnswerDelta) -> None:
        if answer.reasoning:
            block = self._block("thinking", thinking="", signature="")
            block.thinking = f"{block.thinking}{answer.reasoning}"
            self._add_delta("thinking_delta", thinking=answer.reasoning)
        if answer.content:
            block = self._block("text", text="")
            block.text = f"{block.text}{answer.content}"
            self._add_delta("text_delta", text=answer.content)
        for call in answer.calls:
            self._add_call(call)

    def _add_call(self, call: CallDelta) -> None:
        if call.name is not None:
            self._end_block()
            self._block("tool_use", id=self._parser.new_call_id(), name=call.name, input={})
        if call.arguments:
            self._arguments += call.arguments
            self._add_delta("input_json_delta", partial_json=call.arguments)

    def _block(self, kind: str, **fields: Any) -> ContentBlock:
        """The last block, if it is open and of this kind, else a new one with these fields."""
        if not self._is_open or self._blocks[-1].type != kind:
            self._end_block()
            self._blocks.append(ContentBlock(type=kind, **fields))
            self._is_open = True
            event = _event("content_block_start", index=len(self._blocks) - 1, content_block=self._blocks[-1])
            self._events.append(event)
        return self._blocks[-1]

    def _add_delta(self, kind: str, **fields: str) -> None:
        delta = {"type": kind, **fields}
        self._events.append(_event("content_block_delta", index=len(self._blocks) - 1, delta=delta))

    def _end_block(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._blocks[-1].type == "tool_use":
            self._blocks[-1].input = _as_object(self._arguments)
            self._arguments = ""
        self._events.append(_event("content_block_stop", index=len(self._blocks) - 1))

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
