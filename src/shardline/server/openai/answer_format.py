"""What the answers to one request may contain besides content, and the parsers that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardline.server.errors import bad_request
from shardline.server.openai.chat.tools import ToolUse
from shardline.structured.grammar import lark_text
from shardline.text.answer_parser import AnswerParser, ReasoningCounter
from shardline.text.reasoning_parsers.base import ReasoningParser, ThinkingBudget
from shardline.text.tokenizer import Tokenizer

_MAX_BUDGET = 1 << 24
"""More tokens than any answer has."""


@dataclass(frozen=True)
class AnswerFormat:
    """What the text of an answer may contain besides content."""

    tokenizer: Tokenizer
    prompt: str
    """The prompt's text, which may end inside reasoning."""
    tool_use: ToolUse | None = None
    reasoning: type[ReasoningParser] | None = None
    max_reasoning_tokens: int | None = None
    """None: any number."""
    is_free: bool = False
    """Whether the answer is free to have reasoning, and has no required form."""

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self.tool_use is None and self.reasoning is None

    @property
    def reasoning_ended(self) -> bool:
        """Whether an answer has no reasoning, or the prompt has ended it."""
        return self.reasoning is None or self.reasoning(self.prompt).is_over

    @cached_property
    def shown_token_ids(self) -> frozenset[int]:
        """The special tokens whose text the parsers must see."""
        marks = [] if self.tool_use is None else list(self.tool_use.parser.markers)
        if self.reasoning is not None:
            marks += [self.reasoning.begin, self.reasoning.end, *self.reasoning.markers]
        return frozenset(self.special_marks(marks).values()) if marks else frozenset()

    def spell_mark(self, mark: str) -> str:
        """A mark of a format, in Lark."""
        token_id = self.special_marks([mark]).get(mark)
        return lark_text(mark) if token_id is None else f"<[{token_id}]>"

    def special_marks(self, marks: Sequence[str]) -> dict[str, int]:
        """Those of `marks` that are special tokens, and their ids."""
        ids = {mark: self.tokenizer.token_id(mark) for mark in marks}
        special = self.tokenizer.special_token_ids
        return {mark: token_id for mark, token_id in ids.items() if token_id is not None and token_id in special}

    @property
    def budget(self) -> ThinkingBudget | None:
        """The limit of reasoning. None: there is none, or the mark that ends reasoning is no single token."""
        if self.reasoning is None or self.max_reasoning_tokens is None:
            return None
        token_id = self.tokenizer.token_id(self.reasoning.end)
        if token_id is None:
            return None
        return ThinkingBudget(self.max_reasoning_tokens, f"<[{token_id}]>", self.interrupting_marks)

    @property
    def interrupting_marks(self) -> tuple[str, ...]:
        """The marks of calls that end reasoning which has not ended before."""
        may_interrupt = self.tool_use is not None and self.reasoning is not None and self.reasoning.ends_at_calls
        return self.tool_use.parser.call_marks() if self.tool_use is not None and may_interrupt else ()

    def make_parser(self) -> AnswerParser:
        """A parser for one choice."""
        return AnswerParser(
            self._make_reasoning(),
            None if self.tool_use is None else self.tool_use.make_parser(),
        )

    def make_counter(self) -> ReasoningCounter | None:
        """A counter for one choice; None: there is no reasoning to count."""
        parser = self._make_reasoning()
        return None if parser is None else ReasoningCounter(parser, self.tokenizer)

    def _make_reasoning(self) -> ReasoningParser | None:
        marks = None if self.tool_use is None else self.tool_use.parser.call_marks()
        return None if self.reasoning is None else self.reasoning(self.prompt, call_marks=marks, is_free=self.is_free)


def thinking_budget(budget: Any, reasoning: type[ReasoningParser] | None, tokenizer: Tokenizer) -> int | None:
    """The most tokens of reasoning that a request's `thinking_token_budget` allows; None: any number. `reasoning`: how
    the server tells it apart; None: not at all.

    Raises:
        ApiError: 400, it is no number of tokens, or there is nothing that it could limit.
    """
    param = "thinking_token_budget"
    if budget is None or budget == -1:
        return None
    if type(budget) is not int or budget < 0:
        raise bad_request(f"'{param}' must be a non-negative integer, or -1 for unlimited.", param)
    if reasoning is None:
        needs = "server that knows how the model reasons: use --reasoning-parser."
    elif tokenizer.token_id(reasoning.end) is None:
        needs = f"tokenizer in which the mark '{reasoning.end}' is one token, and this model's has no such token."
    else:
        return min(budget, _MAX_BUDGET)
    raise bad_request(f"'{param}' needs a {needs}", param, "unsupported_parameter")
