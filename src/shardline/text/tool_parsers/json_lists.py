"""What formats have in common that write all calls as one JSON list after a mark."""

from __future__ import annotations

from typing import ClassVar

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser


class ListParser(ToolParser):
    """Calls follow the content: a mark, then `[{"name": …, "arguments": …}, …]`."""

    begins: ClassVar[tuple[str, ...]]
    """The mark, in each of its spellings. One that ends with a bracket has that of the list."""
    end: ClassVar[str] = ""
    """The mark behind the list; empty: there is none."""
    space: ClassVar[str] = ""
    """What stands between the first mark and the list."""
    call_form: ClassVar[tuple[str, str, str]] = ('{"name": "', '", "arguments": ', "}")
    """What stands around a call's name and arguments."""

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """The list, after the spelling of the mark that the model knows."""
        known = [mark for mark in cls.begins if mark in rules.special_tokens or mark in rules.template]
        begin = (known or cls.begins)[0]
        opening = "" if begin.endswith("[") else rules.text(cls.space + "[")
        end = rules.mark(cls.end) if cls.end else ""
        before, between, after = cls.call_form
        return f"""
calls: {rules.mark(begin)} rest
auto: TEXT | lead rest
rest: {opening} {rules.repeated("function", ", ")} "]" {end}
{rules.text_before(begin)}
{rules.function_rules(before, rules.text(between), rules.text(after))}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        marks = (*self.begins, self.end) if self.end else self.begins
        while mark := (yield from reader.copy_until(marks, self._write_content)):
            if mark == self.end:
                continue
            yield from reader.skip_space()
            if mark.endswith("[") or (yield from reader.take_literal("[")):
                yield from self._read_list()
