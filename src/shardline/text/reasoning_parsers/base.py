"""What the parsers of reasoning have in common. A format is one file beside this one, found by its name."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline.text.text_reader import Steps, TextReader


@dataclass(frozen=True)
class ThinkingBudget:
    """The most tokens that reasoning may have before it must end."""

    num_tokens: int
    end: str
    """The token of the mark that ends reasoning, in Lark."""
    excluded: Sequence[str] = ()
    """Marks that must not stand in the reasoning."""


class ReasoningParser(ABC):
    """Splits one answer, as it arrives, into reasoning and what follows it. A file's parser is its class `Parser`.

    Whitespace around the reasoning belongs to neither part. Together the parts do not depend on how the text is cut
    into pieces.
    """

    other_names: ClassVar[tuple[str, ...]] = ()
    """What the format is called besides its file's name."""
    begin: ClassVar[str]
    end: ClassVar[str]
    """The marks around the reasoning. A prompt may end with the first one, or with both if it forbids reasoning."""
    other_begins: ClassVar[tuple[str, ...]] = ()
    other_ends: ClassVar[tuple[str, ...]] = ()
    """Other spellings of the marks."""
    begins_unmarked: ClassVar[bool] = False
    """Whether an answer begins with reasoning even if the first mark is missing."""
    free_begins_unmarked: ClassVar[bool] = False
    """The same, of an answer that is free to have reasoning, and has no required form."""
    markers: ClassVar[tuple[str, ...]] = ()
    """Marks of the format besides `begin` and `end` that may be special tokens, and which the parser must see."""
    ends_at_calls: ClassVar[bool] = False
    """Whether the mark of a call ends reasoning that has no mark of its end."""
    reads_content: ClassVar[bool] = False
    """Whether the parser must also see what follows the reasoning, since marks stand there too."""
    template_marks: ClassVar[tuple[str, ...]] = ()
    """If not empty, answers cannot be read without this parser, so that it is chosen for templates with these texts."""

    def __init__(self, prompt: str, *, call_marks: tuple[str, ...] | None = (), is_free: bool = False) -> None:
        """`prompt`: the prompt, or its last part.

        `call_marks`: those of the parser that reads tool calls in the rest; None: there is no such parser.
        `is_free`: whether the answer is free to have reasoning, and has no required form.
        """
        self._has_tools = call_marks is not None
        self._call_marks = (call_marks or ()) if self.ends_at_calls else ()
        self._reader = TextReader()
        self._reasoning = ""
        self._rest = ""
        self._space = ""
        self.is_over = self.ends_reasoning(prompt)
        """Whether all that follows is no reasoning."""
        self.is_marked = False
        """Whether the answer has reasoning, as far as it has come."""
        unmarked = self.begins_unmarked or (is_free and self.free_begins_unmarked)
        self._is_open = unmarked or self.starts_in_reasoning(prompt)
        self._steps = self._parse()
        next(self._steps, None)

    @classmethod
    def starts_in_reasoning(cls, prompt: str) -> bool:
        """Whether the prompt ends with the mark that begins reasoning."""
        return prompt.rstrip().endswith((cls.begin, *cls.other_begins))

    @classmethod
    def ends_reasoning(cls, prompt: str) -> bool:
        """Whether the prompt ends with the mark that ends reasoning, so that an answer has none."""
        return not cls.starts_in_reasoning(prompt) and prompt.rstrip().endswith((cls.end, *cls.other_ends))

    @classmethod
    def write_rules(
        cls, prompt: str, mark: Callable[[str], str], budget: ThinkingBudget | None = None
    ) -> tuple[str, str]:
        """What may stand before an answer, in Lark, and the rules for it. `mark`: spells a mark of the format.

        `budget`: how many tokens the reasoning may have; None: any number.
        """
        if cls.ends_reasoning(prompt):
            return "", ""
        ends = [cls.spell(end, mark) for end in (cls.end, *cls.other_ends)]
        lazy = "" if ends[0].startswith("<[") else "[lazy]"
        rules = f"thoughts{lazy}: THOUGHTS ({' | '.join(ends)})\n"
        if budget is not None:
            limited = f"limited[max_tokens={budget.num_tokens}]: THOUGHTS\n"
            rules = f"thoughts: limited {budget.end}\n{limited}" if budget.num_tokens else f"thoughts: {budget.end}\n"
        excluded = (
            "" if budget is None else "".join(f" & ~/(.|\\n)*{_escape(mark)}(.|\\n)*/" for mark in budget.excluded)
        )
        rules += f"reasoning: thoughts SPACE?\nTHOUGHTS: /(.|\\n)*/{excluded}\nSPACE: /[ \\n]{{1,4}}/\n"
        if cls.starts_in_reasoning(prompt) or cls.begins_unmarked:
            return "reasoning ", rules
        begins = " | ".join(cls.spell(begin, mark) for begin in (cls.begin, *cls.other_begins))
        return "opened? ", f"opened: opening reasoning\nopening: {begins}\n{rules}"

    @classmethod
    def spell(cls, text: str, mark: Callable[[str], str]) -> str:
        """A mark, or several ones with text between them, in Lark."""
        parts = re.split(f"({'|'.join(map(re.escape, cls.markers))})", text) if cls.markers else [text]
        return " ".join(mark(part) for part in parts if part)

    @classmethod
    def content_rule(cls, prompt: str, mark: Callable[[str], str]) -> str:
        """What stands between the reasoning and content, in Lark."""
        return ""

    def add_text(self, text: str) -> tuple[str, str]:
        """The reasoning, and the text after it, that the next piece adds."""
        if self.is_over and not self.reads_content:
            return "", text
        if self._reader.add_text(text):
            next(self._steps, None)
        return self._take()

    def end_text(self, *, cut: bool = False) -> tuple[str, str]:
        """What was held back until the end of the text; `cut`: although the answer had not come to its end."""
        self._reader.end_text(cut=cut)
        for _ in self._steps:
            pass
        return self._take()

    def _parse(self) -> Steps[None]:
        yield from self._read_reasoning()
        self._rest += self._reader.take()

    def _read_reasoning(self) -> Steps[None]:
        """Read the reasoning, if there is any, and the space behind it."""
        reader = self._reader
        if self.is_over:
            return
        reader.start_record()
        yield from reader.skip_space()
        marked = False
        for begin in (self.begin, *self.other_begins):
            marked = marked or (yield from reader.take_literal(begin))
        skipped = reader.take_record()
        if marked or self._is_open:
            self.is_marked = True
            yield from reader.skip_space()
            marks = (self.end, *self.other_ends, *self._call_marks)
            mark = yield from reader.copy_until(marks, self._write_reasoning)
            if mark in self._call_marks:
                reader.unread(mark)
            elif mark:
                yield from reader.skip_space()
        else:
            self._rest += skipped
        self.is_over = True

    def _write_reasoning(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._reasoning += shown

    def _take(self) -> tuple[str, str]:
        reasoning, rest = self._reasoning, self._rest
        self._reasoning = self._rest = ""
        return reasoning, rest


def _escape(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
