"""Kimi K2: calls between marks, each with an id `functions.name:index` and its arguments."""

from __future__ import annotations

from shardline.structured.grammar import lark_text
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser

_FIRST, _LAST = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _SEPARATOR, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAMESPACE = "functions."


class Parser(ToolParser):
    """Calls follow one another in one section after the content."""

    template_marks = (_FIRST,)
    markers = (_FIRST, _LAST, _BEGIN, _SEPARATOR, _END)

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The first mark."""
        return (_FIRST,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """In the form that the chat template shows."""
        between = f"{lark_text(':')} INDEX {rules.mark(_SEPARATOR)}"
        return f"""
calls: {rules.mark(_FIRST)} rest
auto: TEXT | lead rest
rest: {rules.repeated("call", "")} {rules.mark(_LAST)}
call: {rules.mark(_BEGIN)} function {rules.mark(_END)}
INDEX: /[0-9]{{1,3}}/
{rules.text_before(_FIRST)}
{rules.function_rules(_NAMESPACE, between, "")}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while mark := (yield from reader.copy_until((_FIRST, _BEGIN, _LAST), self._write_content)):
            if mark == _FIRST:
                yield from reader.skip_space()
                mark = _BEGIN if (yield from reader.take_literal(_BEGIN)) else mark
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
        name, _, index = "".join(before).strip().removeprefix(_NAMESPACE).rpartition(":")
        self._start_call(name or index)
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            mark = yield from reader.copy_until((_END, _LAST), lambda text: None)
            reader.unread(mark)
            if mark:
                self._end_call()
        elif (yield from self._read_arguments()):
            self._end_call()
        return True
