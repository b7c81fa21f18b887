"""DeepSeek V3, R1-0528 and V3.1: calls between marks, with a JSON code block or with the arguments alone."""

from __future__ import annotations

from typing import ClassVar

from shardline.structured.grammar import lark_text
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser

_FIRST, _LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class Parser(ToolParser):
    """V3 writes `function<sep>name`, a line break and a code block; V3.1 writes `name<sep>{…}`.

    Other formats of this form have other `markers`, in this order, and another `_read_name`.
    """

    other_names: ClassVar[tuple[str, ...]] = ("deepseek_v31",)
    template_marks = (_FIRST,)
    markers = (_FIRST, _LAST, _BEGIN, _SEPARATOR, _END)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """In the form that the chat template shows."""
        begin, separator, end = (rules.mark(mark) for mark in (_BEGIN, _SEPARATOR, _END))
        if "```json" in rules.template:
            call = f'{begin} "function" {separator} function {end}'
            functions = rules.function_rules("", lark_text("\n```json\n"), lark_text("\n```"))
            calls = rules.repeated("call", "\n")
        else:
            call = f"{begin} function {end}"
            functions = rules.function_rules("", separator, "")
            calls = rules.repeated("call", "")
        return f"""
calls: {rules.mark(_FIRST)} rest
auto: TEXT | lead rest
rest: {calls} {rules.mark(_LAST)}
call: {call}
{rules.text_before(_FIRST)}
{functions}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        first, last, begin, *_ = self.markers
        while mark := (yield from reader.copy_until((first, begin, last), self._write_content)):
            if mark == first:
                yield from reader.skip_space()
                yield from reader.take_literal(begin)
                mark = begin
            while mark == begin:
                is_call = yield from self._read_marked_call()
                mark = yield from reader.copy_until(
                    (begin, last), (lambda text: None) if is_call else self._write_content
                )

    def _read_marked_call(self) -> Steps[bool]:
        reader = self._reader
        _, last, _, separator, end = self.markers
        before: list[str] = []
        mark = yield from reader.copy_until((separator, end, last), before.append)
        if mark != separator:
            self._give_up("".join(before), is_markup=True)
            if mark == last:
                reader.unread(mark)
            return False
        name = yield from self._read_name("".join(before))
        if name is None:
            return False
        self._start_call(name)
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            mark = yield from reader.copy_until((end, last), lambda text: None)
            reader.unread(mark)
            if mark:
                self._end_call()
        elif (yield from self._read_arguments()):
            self._end_call()
        return True

    def _read_name(self, before: str) -> Steps[str | None]:
        """The name of a function, whose call has the text `before` in front of the separator; None: it is no call."""
        reader = self._reader
        if (yield from reader.peek()) == "{":
            return before.strip()
        name: list[str] = []
        if not (yield from reader.copy_until(("\n",), name.append)):
            self._give_up("".join(name), is_markup=True)
            return None
        yield from reader.skip_space()
        yield from reader.take_literal("```json")
        return "".join(name).strip()
