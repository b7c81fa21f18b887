"""An answer, as it arrives, as output items and as the events that tell how they grow."""

from __future__ import annotations

from typing import Any

import msgspec

from shardline.server.openai.logprobs import ChatLogprob
from shardline.server.openai.responses.output_items import (
    CallItem,
    Event,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from shardline.server.service import new_id
from shardline.text.answer_delta import AnswerDelta
from shardline.text.answer_parser import AnswerParser


class ItemWriter:
    """Writes the items of one answer. Every method appends its events, encoded, to `events`."""

    def __init__(self, parser: AnswerParser) -> None:
        self.items: list[OutputItem] = []
        self.events: list[bytes] = []
        self._parser = parser
        self._encoder = msgspec.json.Encoder()
        self._num_events = 0
        self._open: OutputItem | None = None

    def add_event(self, type: str, **fields: Any) -> None:
        """Append an event."""
        data = self._encoder.encode(Event(type=type, sequence_number=self._num_events, **fields))
        self.events.append(b"event: " + type.encode() + b"\ndata: " + data + b"\n\n")
        self._num_events += 1

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
                self._begin(CallItem(id=new_id("fc"), call_id=self._parser.new_call_id(), name=call.name))
            if call.arguments:
                item = self._open
                assert isinstance(item, CallItem)
                item.arguments += call.arguments
                self._add_item_event("response.function_call_arguments.delta", item, delta=call.arguments)

    def end_answer(self, *, cut: bool) -> None:
        """End the last item; `cut`: although the answer had not come to its end. There is at least one item then."""
        if not self.items:
            self._begin_message()
        self._end_item(cut=cut)

    def _add_reasoning(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            item = self._begin(ReasoningItem(id=new_id("rs")))
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
        item = self._begin(MessageItem(id=new_id("msg")))
        assert isinstance(item, MessageItem)
        self._add_item_event("response.content_part.added", item, content_index=0, part=OutputText())
        item.content = [OutputText(logprobs=[])]
        return item

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
        if isinstance(item, CallItem):
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
