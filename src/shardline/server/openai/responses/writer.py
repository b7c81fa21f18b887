"""Writes the answers of POST /v1/responses: output items, and the events of a stream."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec

from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.receipts.receipt import Receipt
from shardline.server.errors import ApiError
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.answer_parts import ChatLogprob, TokenPieces, chat_logprobs
from shardline.server.openai.generation import SentChoice
from shardline.server.sse import Events
from shardline.text.answer_parser import AnswerParser
from shardline.text.tool_parsers.base import AnswerDelta

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
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    status: Status = "in_progress"
    arguments: str = ""


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; `input` is any text."""

    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    status: Status = "in_progress"
    input: str = ""


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


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


class RawMessage(msgspec.Struct, frozen=True, tag_field="type", tag="raw_message_tokens"):
    """What the model has read, or what it has written."""

    message: str
    tokens: list[int]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. The fields after `usage` repeat the request."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
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
    input_messages: list[RawMessage] | msgspec.UnsetType = msgspec.UNSET
    output_messages: list[RawMessage] | msgspec.UnsetType = msgspec.UNSET
    receipt: Receipt | msgspec.UnsetType = msgspec.UNSET


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
    input: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatLogprob] | msgspec.UnsetType = msgspec.UNSET


class ItemWriter:
    """Writes the items of one answer. Every method appends its events, encoded, to `events`."""

    def __init__(self, response_id: str, parser: AnswerParser, namespaces: Mapping[str, tuple[str, str]]) -> None:
        """`response_id`: ids of items and calls follow from it, so that an answer that goes on has those that it had.
        `namespaces`: by the name that the model calls, the namespace and the function's name in it."""
        self.items: list[OutputItem] = []
        self.events: list[bytes] = []
        self.num_events = 0
        """The number of the next event."""
        self._response_id = response_id
        self._parser = parser
        self._namespaces = namespaces
        self._encoder = msgspec.json.Encoder()
        self._open: OutputItem | None = None

    def add_event(self, type: str, **fields: Any) -> None:
        """Append an event."""
        data = self._encoder.encode(Event(type=type, sequence_number=self.num_events, **fields))
        self.events.append(b"event: " + type.encode() + b"\ndata: " + data + b"\n\n")
        self.num_events += 1

    def take_events(self) -> bytes:
        """The events since the last call."""
        events, self.events = self.events, []
        return b"".join(events)

    def add_answer(self, delta: AnswerDelta, logprobs: list[ChatLogprob]) -> None:
        """Add a part of the answer; `logprobs` are those of the tokens of its content."""
        if delta.reasoning:
            self._add_reasoning(delta.reasoning)
        if delta.content:
            self._add_text(delta.content, logprobs)
        for call in delta.calls:
            if call.name is not None:
                namespace, name = self._namespaces.get(call.name, (msgspec.UNSET, call.name))
                call_id = self._parser.new_call_id(self._next_digest(b"call")[:12])
                fields: dict[str, Any] = {"call_id": call_id, "name": name, "namespace": namespace}
                self._begin(
                    CustomCallItem(id=self._next_id("ctc_"), **fields)
                    if call.is_custom
                    else CallItem(id=self._next_id("fc_"), **fields)
                )
            if call.arguments:
                item = self._open
                if isinstance(item, CustomCallItem):
                    item.input += call.arguments
                    self._add_item_event("response.custom_tool_call_input.delta", item, delta=call.arguments)
                    continue
                assert isinstance(item, CallItem)
                item.arguments += call.arguments
                self._add_item_event("response.function_call_arguments.delta", item, delta=call.arguments)

    def end_answer(self, *, cut: bool) -> None:
        """End the last item; `cut`: although the answer had not come to its end. There is at least one item then, and a
        delta before the end of its text, as clients expect."""
        if not self.items:
            self._add_text("", [])
        self._end_item(cut=cut)

    def _add_reasoning(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            item = self._begin(ReasoningItem(id=self._next_id("rs_")))
            assert isinstance(item, ReasoningItem)
            self._add_item_event("response.content_part.added", item, content_index=0, part=ReasoningText())
            item.content = [ReasoningText()]
        assert isinstance(self._open, ReasoningItem)
        self._open.content[0].text += text
        self._add_item_event("response.reasoning_text.delta", self._open, content_index=0, delta=text)

    def _add_text(self, text: str, logprobs: list[ChatLogprob]) -> None:
        item = self._open if isinstance(self._open, MessageItem) else self._begin_message()
        part = item.content[0]
        part.text += text
        part.logprobs += logprobs
        self._add_item_event("response.output_text.delta", item, content_index=0, delta=text, logprobs=logprobs)

    def _begin_message(self) -> MessageItem:
        item = self._begin(MessageItem(id=self._next_id("msg_")))
        assert isinstance(item, MessageItem)
        self._add_item_event("response.content_part.added", item, content_index=0, part=OutputText())
        item.content = [OutputText(logprobs=[])]
        return item

    def _next_id(self, prefix: str) -> str:
        return prefix + self._next_digest(b"item").hex()

    def _next_digest(self, kind: bytes) -> bytes:
        """16 bytes for the item that comes next."""
        name = f"{self._response_id}/{len(self.items)}/".encode() + kind
        return hashlib.blake2b(name, digest_size=16).digest()

    def _begin(self, item: OutputItem) -> OutputItem:
        self._end_item(cut=False)
        self.items.append(item)
        self._open = item
        self.add_event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        return item

    def _end_item(self, *, cut: bool) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, CustomCallItem):
            self._add_item_event("response.custom_tool_call_input.done", item, input=item.input)
        elif isinstance(item, CallItem):
            self._add_item_event(
                "response.function_call_arguments.done", item, name=item.name, arguments=item.arguments
            )
        else:
            part = item.content[0]
            if isinstance(part, OutputText):
                fields = {"text": part.text, "logprobs": part.logprobs}
                self._add_item_event("response.output_text.done", item, content_index=0, **fields)
            else:
                self._add_item_event("response.reasoning_text.done", item, content_index=0, text=part.text)
            self._add_item_event("response.content_part.done", item, content_index=0, part=part)
        item.status = "incomplete" if cut else "completed"
        self.add_event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _add_item_event(self, type: str, item: OutputItem, **fields: Any) -> None:
        self.add_event(type, item_id=item.id, output_index=len(self.items) - 1, **fields)


class ResponseWriter:
    """Writes one response.

    Args:
        response: the response without output.
        keep: called with the response when it has ended, unless it fails.
        with_reasoning: whether reasoning is shown.
        namespaces: see `ItemWriter`.
    """

    def __init__(
        self,
        response: ResponseObject,
        answer_format: AnswerFormat,
        keep: Callable[[ResponseObject], object] | None,
        *,
        with_reasoning: bool = True,
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        self.response = response
        self._format = answer_format
        self._keep = keep
        self._with_reasoning = with_reasoning
        self._parser = answer_format.make_parser()
        self._items = ItemWriter(response.id, self._parser, namespaces)
        self._sent = SentChoice()
        self._counter = answer_format.make_counter()
        self._held: list[ChatLogprob] = []
        """Logprobs of tokens whose text the parser still holds back."""

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self._format.tokenizer)

    def write_whole(self, output: RequestOutput) -> bytes:
        """The JSON of the whole response."""
        self._add_output(output)
        self._items.take_events()
        return msgspec.json.encode(self.response)

    def write_events(self, num_before: int = 0) -> Events:
        """The events of a stream, in OpenAI's order.

        `num_before`: events that another server has written, of the first output that comes.
        """
        self._items.add_event("response.created", response=self.response)
        self.response.status = "in_progress"
        self._items.add_event("response.in_progress", response=self.response)
        while (update := (yield self._items.take_events())) is not None:
            self._add_output(update[1])
            if num_before:
                self._items.num_events, num_before = num_before, 0
        self._items.add_event(f"response.{self.response.status}", response=self.response)
        yield self._items.take_events()

    def write_error(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        self._items.take_events()
        self.response.status = "failed"
        self.response.error = {"code": error.code or "server_error", "message": str(error.detail)}
        self._items.add_event("response.failed", response=self.response)
        return self._items.take_events()

    def _add_output(self, output: RequestOutput) -> None:
        delta = self._sent.take_delta(output.outputs[0], tokens_matter=True)
        if delta is None:
            return
        self._add_answer(delta, output.outputs[0].token_ids)
        if delta.finish_reason is not None:
            self._end_response(output, delta.finish_reason == "stop")

    def _add_answer(self, delta: CompletionOutput, token_ids: list[int]) -> None:
        if delta.token_logprobs is not None:
            # Tokens of reasoning are not reported.
            before = len(token_ids) - len(delta.token_ids)
            skipped = max(0, self._num_reasoning(token_ids) - before)
            new = chat_logprobs(self._pieces, delta.token_ids[skipped:], delta.token_logprobs[skipped:])
            self._held += new.content
        answers = self._parser.read(delta.text, delta.finish_reason)
        for answer in answers:
            if not self._with_reasoning:
                answer.reasoning = ""
            if answer:
                # Neither are those of calls.
                logprobs, self._held = self._held, []
                self._items.add_answer(answer, logprobs if answer.content else [])

    def _num_reasoning(self, token_ids: list[int]) -> int:
        return 0 if self._counter is None else self._counter.count_tokens(token_ids)

    def _end_response(self, output: RequestOutput, complete: bool) -> None:
        response = self.response
        self._items.end_answer(cut=not complete)
        response.output = self._items.items
        response.status = "completed" if complete else "incomplete"
        response.completed_at = int(time.time())
        if not complete:
            response.incomplete_details = {"reason": "max_output_tokens"}
        token_ids = output.outputs[0].token_ids
        num_input, num_output = len(output.prompt_token_ids), len(token_ids)
        response.usage = ResponseUsage(
            num_input,
            InputTokensDetails(output.num_cached_tokens),
            num_output,
            OutputTokensDetails(self._num_reasoning(token_ids)),
            num_input + num_output,
        )
        if response.output_messages is not msgspec.UNSET:
            response.output_messages = [RawMessage(output.outputs[0].text, token_ids)]
        if self._with_reasoning or self._format.reasoning is None:
            # Its tokens would tell the reasoning that the answer leaves out.
            response.receipt = output.outputs[0].receipt or msgspec.UNSET
        if self._keep is not None:
            self._keep(response)
