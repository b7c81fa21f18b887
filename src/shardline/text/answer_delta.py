"""The parts of an answer that a parser finds: reasoning, content and tool calls."""

from __future__ import annotations

import msgspec


class CallDelta(msgspec.Struct):
    """What is new in one tool call."""

    index: int
    name: str | None
    """The function's name, with the first delta of a call; None: an earlier delta had it."""
    arguments: str
    """The next part of the arguments' JSON text."""


class AnswerDelta(msgspec.Struct):
    """What a piece of text adds to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def start_call(self, index: int, name: str) -> None:
        """Add the beginning of a call."""
        self.calls.append(CallDelta(index, name, ""))

    def add_arguments(self, index: int, text: str) -> None:
        """Add text to the arguments of a call."""
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += text
        else:
            self.calls.append(CallDelta(index, None, text))
