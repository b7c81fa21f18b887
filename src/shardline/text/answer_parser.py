"""The text of one answer, as it arrives, as reasoning, content and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.tokenizer import Tokenizer
from shardline.text.tool_parsers.base import AnswerDelta, ToolParser


class AnswerParser:
    """A parser of reasoning, and behind it a parser of tool calls; either may be missing."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def has_calls(self) -> bool:
        """Whether the answer so far has a tool call."""
        return self._tools is not None and self._tools.num_calls > 0

    def new_call_id(self, source: bytes = b"") -> str:
        """An id for a tool call, from 12 bytes, or a random one."""
        assert self._tools is not None
        return self._tools.call_id(source or secrets.token_bytes(12))

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

    def read(self, text: str, finish_reason: str | None) -> list[AnswerDelta]:
        """What the next piece of text adds, and, if there is a reason why the answer has ended, what was held back."""
        answers = [self.add_text(text)]
        if finish_reason is not None:
            answers.append(self.end_text(cut=finish_reason != "stop"))
        return answers


class ReasoningCounter:
    """Counts the tokens of one answer up to the end of its reasoning, the marks and the space behind them included."""

    def __init__(self, parser: ReasoningParser, tokenizer: Tokenizer) -> None:
        """`parser`: a parser that has read nothing, and that nobody else uses."""
        self._parser = parser
        self._tokenizer = tokenizer
        self._num_seen = 0
        self._count = 0

    def count_tokens(self, token_ids: Sequence[int]) -> int:
        """The number of reasoning tokens in the answer so far; `token_ids` are all of its tokens."""
        while self._num_seen < len(token_ids) and not self._parser.is_over:
            piece = self._tokenizer.token_bytes(token_ids[self._num_seen])
            # Half a character is no part of a mark.
            _, rest = self._parser.add_text(piece.decode("utf-8", "replace"))
            self._num_seen += 1
            self._count += not rest
        return self._count if self._parser.is_marked else 0
