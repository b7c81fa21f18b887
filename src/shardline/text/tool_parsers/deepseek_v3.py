"""DeepSeek V3, R1-0528 and V3.1: calls between marks, with a JSON code block or with the arguments alone."""

from __future__ import annotations

from shardline.structured.grammar import lark_text
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser

_FIRST, _LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class Parser(ToolParser):
    """V3 writes `function<sep>name`, a line break and a code block; V3.1 writes `name<sep>{…}`."""

    other_names = ("deepseek_v31",)
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
        while mark := (yield from reader.copy_until((_FIRST, _BEGIN, _LAST), self._write_content)):
            if mark == _FIRST:
                yield from reader.skip_space()
                yield from reader.take_literal(_BEGIN)
                mark = _BEGIN
            while mark == _BEGIN:
                is_call = yield from self._read_marked_call()
                mark = yield from reader.copy_until(
                    (_BEGIN, _LAST), (lambda text: None) if is_call else self._write_content
                )

    def _read_marked_call(self) -> Steps[bool]:
        reader = self._reader
        before: list[str] = []
        mark = yield from reader.copy_until((_SEPARATOR, _END, _LAST), before.append)
        if mark != _SEPARATOR:
            self._give_up("".join(before), is_markup=True)
            if mark == _LAST:
                reader.unread(mark)
            return False
        name = before
        if (yield from reader.peek()) != "{":
            name = []
            if not (yield from reader.copy_until(("\n",), name.append)):
                self._give_up("".join(name), is_markup=True)
                return False
            yield from reader.skip_space()
            yield from reader.take_literal("```json")
            yield from reader.skip_space()
        self._start_call("".join(name).strip())
        if (yield from reader.peek()) != "{":
            mark = yield from reader.copy_until((_END, _LAST), lambda text: None)
            reader.unread(mark)
            if mark:
                self._end_call()
        elif (yield from self._read_arguments()):
            self._end_call()
        return True
