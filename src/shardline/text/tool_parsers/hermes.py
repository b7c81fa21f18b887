"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": …, "arguments": …}</tool_call>`, one element for each call."""

from __future__ import annotations

from shardline.structured.grammar import lark_text
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser

_BEGIN, _END = "<tool_call>", "</tool_call>"
_ARGUMENTS = lark_text('", "arguments": ')
_CLOSE = lark_text("}\n")


class Parser(ToolParser):
    """Calls are JSON objects in XML elements; content may stand around them."""

    template_marks = (_BEGIN, _END)
    markers = (_BEGIN, _END)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """An element for each call."""
        return f"""
calls: {rules.repeated("call", chr(10))}
call: {rules.mark(_BEGIN)} rest
auto: {"(lead rest)* TEXT" if rules.parallel else "TEXT | lead rest"}
rest: function {rules.mark(_END)}
{rules.text_before(_BEGIN)}
{rules.function_rules(f'{chr(10)}{{"name": "', _ARGUMENTS, _CLOSE)}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while (yield from reader.copy_until((_BEGIN,), self._write_content)):
            mark = _BEGIN
            while mark == _BEGIN:
                yield from reader.skip_space()
                is_call = yield from self._read_call()
                # Some models do not close an element before they open the next one.
                mark = yield from reader.copy_until(
                    (_BEGIN, _END), (lambda text: None) if is_call else self._write_content
                )
