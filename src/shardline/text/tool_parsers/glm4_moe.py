"""GLM-4.5 and later: `<tool_call>name`, then `<arg_key>…</arg_key>` and `<arg_value>…</arg_value>` in turn."""

from __future__ import annotations

from typing import ClassVar

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules
from shardline.text.tool_parsers.tagged import NAME, ArgumentTags, TaggedParser, TaggedRules


class Parser(TaggedParser):
    """An element for each call. GLM-4.5 writes a line break between its parts, GLM-4.7 writes none."""

    other_names: ClassVar[tuple[str, ...]] = ("glm45", "glm47", "ling3", "poolside_v1")
    begin: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = "</tool_call>"
    outer: ClassVar[tuple[str, ...]] = ()
    """The marks around all calls; empty: there are none."""
    name_end: ClassVar[str] = ""
    """The mark behind a function's name; empty: there is none."""
    key: ClassVar[tuple[str, str]] = ("<arg_key>", "</arg_key>")
    value: ClassVar[tuple[str, str]] = ("<arg_value>", "</arg_value>")
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "<arg_key>", "<arg_value>")
    markers: ClassVar[tuple[str, ...]] = (begin, end, *key, *value)

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The first mark."""
        return cls.outer[:1] or (cls.begin,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """In the form that the chat template shows."""
        line = "" if cls.key[1] + cls.value[0] in rules.template else "\n"
        tags = ArgumentTags([cls.key[0]], [cls.key[1], line, cls.value[0]], [cls.value[1], line])
        functions = TaggedRules(rules, tags).write([], [cls.name_end, line], [])
        forms = f"""
calls: {rules.last("call", line)}
auto: {"(lead rest)* TEXT" if rules.parallel else "TEXT | lead rest"}
rest: function {rules.mark(cls.end)}
call: {rules.mark(cls.begin)} rest
{rules.text_before(cls.begin)}
"""
        if cls.outer:
            between = rules.text(line) if line else ""
            forms = f"""
calls: {rules.mark(cls.outer[0])} rest
auto: TEXT | lead rest
rest: {between} {rules.repeated("call", line)} {between} {rules.mark(cls.outer[1])}
call: {rules.mark(cls.begin)} function {rules.mark(cls.end)}
{rules.text_before(cls.outer[0])}
"""
        return forms + functions

    def _parse(self) -> Steps[None]:
        reader = self._reader
        marks = (self.begin, self.end, *self.outer)
        while mark := (yield from reader.copy_until(marks, self._write_content)):
            if mark in self.outer[:1]:
                yield from reader.skip_space()
            while mark == self.begin:
                mark = yield from self._read_tagged_call()

    def _read_tagged_call(self) -> Steps[str]:
        """Read a call after its first mark; returns the mark that ended it."""
        reader = self._reader
        yield from reader.skip_space()
        words: list[str] = []
        name_ends = ("\n", self.name_end) if self.name_end else ("\n",)
        ends = (self.key[0], self.end, self.begin)
        mark = yield from reader.copy_until((*name_ends, *ends), words.append)
        name = "".join(words).strip()
        if not mark or not NAME.fullmatch(name):
            self._give_up("".join(words), is_markup=True)
            reader.unread(mark)
            return ""
        self._start_tagged_call(name)
        if mark in name_ends:
            mark = yield from reader.copy_until(ends, lambda text: None)
        while mark == self.key[0]:
            key: list[str] = []
            if not (yield from reader.copy_until((self.key[1],), key.append)):
                return ""
            if not (yield from reader.copy_until((self.value[0],), lambda text: None)):
                return ""
            if not (yield from self._read_value("".join(key).strip(), (self.value[1],))):
                return ""
            mark = yield from reader.copy_until(ends, lambda text: None)
        if mark:
            self._end_tagged_call()
        return mark
