"""The text of one answer, as it arrives, as reasoning, content and tool calls."""

from __future__ import annotations

from shardline.text.answer_delta import AnswerDelta
from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.tool_parsers.base import ToolParser


class AnswerParser:
    """A parser of reasoning, and behind it a parser of tool calls; either may be missing."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def has_calls(self) -> bool:
        """Whether the answer so far has a tool call."""
        return self._tools is not None and self._tools.num_calls > 0

    def new_call_id(self) -> str:
        """An id for a tool call."""
        assert self._tools is not None
        return self._tools.new_call_id()

    def add_text(self, text: str) -> AnswerDelta:
        """What the next piece of text adds."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.add_text(text)
            if self._reasoning.is_over and not self._reasoning.reads_content:
                self._reasoning = None
        delta = AnswerDelta(content=text) if self._tools is None else self._tools.add_text(text)
        delta.reasoning = reasoning
        return delta

    def end_text(self, *, cut: bool = False) -> AnswerDelta:
        """What was held back until the end of the text; `cut`: although the answer had not come to its end."""
        delta = AnswerDelta()
        if self._reasoning is not None:
            delta.reasoning, delta.content = self._reasoning.end_text(cut=cut)
        if self._tools is not None:
            first = self._tools.add_text(delta.content)
            last = self._tools.end_text(cut=cut)
            delta.content = first.content + last.content
            delta.calls = first.calls + last.calls
        return delta
