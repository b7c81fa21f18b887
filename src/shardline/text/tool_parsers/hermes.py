"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": …, "arguments": …}</tool_call>`, one element for each call."""

from __future__ import annotations

from typing import ClassVar

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser


class Parser(ToolParser):
    """Calls are JSON objects in XML elements; content may stand around them."""

    other_names: ClassVar[tuple[str, ...]] = ("ernie45", "granite4", "qwen3_json")
    begin: ClassVar[str] = "<tool_call>"
    after_begin: ClassVar[str] = ""
    """A second mark that follows the first one."""
    end: ClassVar[str] = "</tool_call>"
    """Empty: a call ends with its object."""
    arguments_key: ClassVar[str] = "arguments"
    space: ClassVar[tuple[str, str]] = ("\n", "\n")
    """What stands before and after the object."""
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The first mark."""
        return (cls.begin,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """An element for each call."""
        before, after = cls.space
        between = rules.text(f'", "{cls.arguments_key}": ')
        second = f"{rules.mark(cls.after_begin)} " if cls.after_begin else ""
        return f"""
calls: {rules.last("call", chr(10))}
call: {rules.mark(cls.begin)} rest
auto: {"(lead rest)* TEXT" if rules.parallel else "TEXT | lead rest"}
rest: {second}function {rules.mark(cls.end) if cls.end else ""}
{rules.text_before(cls.begin)}
{rules.function_rules(f'{before}{{"name": "', between, rules.text("}" + after))}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while (yield from reader.copy_until((self.begin,), self._write_content)):
            mark = self.begin
            while mark == self.begin:
                if self.after_begin:
                    yield from reader.take_mark(self.after_begin)
                yield from reader.skip_space()
                is_call = yield from self._read_call()
                if not self.end:
                    break
                # Some models do not close an element before they open the next one.
                mark = yield from reader.copy_until(
                    (self.begin, self.end), (lambda text: None) if is_call else self._write_content
                )
