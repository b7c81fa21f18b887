"""Writers of answers that are blocks of reasoning and of text, and calls, as in Anthropic's and in Cohere's API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from shardline.api.outputs import RequestOutput
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.generation import SentChoice


@dataclass
class BlockWriter(ABC):
    """Writes the answer to one request. At most one block or call is open, the last one."""

    answer_format: AnswerFormat

    def __post_init__(self) -> None:
        self._parser = self.answer_format.make_parser()
        self._sent = SentChoice()
        self._events: list[bytes] = []

    @abstractmethod
    def _add_content(self, kind: Literal["thinking", "text"], text: str) -> None:
        """Add to the last block, if it is open and of this kind, else to a new one. Its field has the kind's name."""

    @abstractmethod
    def _begin_call(self, name: str) -> None:
        """Begin a call; no block is open."""

    @abstractmethod
    def _add_arguments(self, text: str) -> None:
        """Add to the arguments of the last call, JSON text."""

    @abstractmethod
    def _end_block(self) -> None:
        """End the last block or call, if it is open."""

    def _add_output(self, output: RequestOutput) -> None:
        delta = self._sent.take_delta(output.outputs[0], tokens_matter=False)
        if delta is None:
            return
        for answer in self._parser.read(delta.text, delta.finish_reason):
            if answer.reasoning:
                self._add_content("thinking", answer.reasoning)
            if answer.content:
                self._add_content("text", answer.content)
            for call in answer.calls:
                if call.name is not None:
                    self._end_block()
                    self._begin_call(call.name)
                if call.arguments:
                    self._add_arguments(call.arguments)
        if delta.finish_reason is not None:
            self._end_block()

    def _take_events(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)
