"""MiniMax M2: calls as `<invoke name="…">` with `<parameter name="…">…</parameter>`, in one element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules
from shardline.text.tool_parsers.tagged import NAME, ArgumentTags, TaggedParser, TaggedRules

NAME_END = '">'


class Parser(TaggedParser):
    """Calls follow one another in one element after the content."""

    other_names: ClassVar[tuple[str, ...]] = ()
    begins: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>",)
    """The mark before all calls, in each of its spellings."""
    ends: ClassVar[tuple[str, ...]] = ("</minimax:tool_call>",)
    """The mark behind them, in the same order."""
    invoke: ClassVar[str] = '<invoke name="'
    invoke_end: ClassVar[str] = "</invoke>"
    parameter: ClassVar[str] = '<parameter name="'
    parameter_end: ClassVar[str] = "</parameter>"
    key_ends: ClassVar[Mapping[str, bool]] = {NAME_END: False}
    """What may follow a parameter's name, and whether it says that the value is a text."""
    before_call: ClassVar[tuple[str, ...]] = ()
    after_call: ClassVar[tuple[str, ...]] = ()
    """Parts of text around each call."""
    line: ClassVar[str] = "\n"
    """What stands between tags."""
    template_marks: ClassVar[tuple[str, ...]] = begins
    markers: ClassVar[tuple[str, ...]] = begins + ends

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The first mark."""
        return cls.begins

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """One element with all calls, in the spelling that the model knows."""
        spellings = list(zip(cls.begins, cls.ends, strict=True))
        begin, end = next((marks for marks in spellings if marks[0] in rules.template), spellings[0])
        texts = [mark for mark, is_text in cls.key_ends.items() if is_text]
        others = [mark for mark, is_text in cls.key_ends.items() if not is_text]

        def tags_of(name: str, types: frozenset[str]) -> ArgumentTags:
            after = texts if texts and types == {"string"} else others
            return ArgumentTags([cls.parameter], after[:1], [cls.parameter_end, cls.line])

        functions = TaggedRules(rules, tags_of("", frozenset()), tags_of).write(
            [*cls.before_call, cls.invoke], [NAME_END, cls.line], [cls.invoke_end, *cls.after_call, cls.line]
        )
        return f"""
calls: {rules.mark(begin)} rest
auto: TEXT | lead rest
rest: {rules.text(cls.line) if cls.line else ""} {rules.repeated("function", "")} {rules.mark(end)}
{rules.text_before(begin)}
{functions}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while mark := (yield from reader.copy_until((*self.begins, *self.ends), self._write_content)):
            if mark in self.begins:
                yield from self._read_calls()

    def _read_calls(self) -> Steps[None]:
        """Read the calls of an element. Text between them is no content."""
        reader = self._reader
        yield from reader.skip_space()
        num_calls = self.num_calls
        held: list[str] = []
        while True:
            mark = yield from reader.copy_until((self.invoke, *self.ends, *self.begins), held.append)
            if mark == self.invoke:
                if not (yield from self._read_invoke(held)):
                    return
            elif mark not in self.begins:
                break
        if self.num_calls == num_calls:
            self._give_up("".join(held), is_markup=True)

    def _read_invoke(self, held: list[str]) -> Steps[bool]:
        """Read a call; returns whether more may follow. What is no call is added to `held`."""
        reader = self._reader
        words: list[str] = []
        mark = yield from reader.copy_until((NAME_END, "\n", *self.ends), words.append)
        if mark != NAME_END or not NAME.fullmatch("".join(words)):
            held += words
            if mark in self.ends:
                reader.unread(mark)
            return bool(mark)
        self._start_tagged_call("".join(words))
        mark = yield from self._read_parameters()
        if not mark:
            return False
        self._end_tagged_call()
        if mark != self.invoke_end:
            reader.unread(mark)
        return True

    def _read_parameters(self) -> Steps[str]:
        """Read the parameters of a call; returns the mark behind them, or nothing if one is cut."""
        reader = self._reader
        ends = (self.parameter, self.invoke_end, self.invoke, *self.ends)
        while (mark := (yield from reader.copy_until(ends, lambda text: None))) == self.parameter:
            key: list[str] = []
            key_end = yield from reader.copy_until(tuple(self.key_ends), key.append)
            if not key_end or not (yield from self._read_text("".join(key), self.key_ends[key_end])):
                return ""
        return mark

    def _read_text(self, key: str, is_text: bool) -> Steps[bool]:
        """Read the value of a parameter up to its end; returns whether it is whole."""
        return (yield from self._read_value(key, (self.parameter_end,), is_text=is_text))
