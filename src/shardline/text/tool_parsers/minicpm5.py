"""MiniCPM 5: `<function name="…"><param name="…">…</param></function>`, one element for each call."""

from __future__ import annotations

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers import minimax_m2
from shardline.text.tool_parsers.base import CallRules
from shardline.text.tool_parsers.tagged import ArgumentTags, TaggedRules

_CDATA, _CDATA_END = "<![CDATA[", "]]>"


class Parser(minimax_m2.Parser):
    """Nothing encloses all calls. A value may be CDATA."""

    begins = ()
    ends = ()
    invoke = '<function name="'
    invoke_end = "</function>"
    parameter = '<param name="'
    parameter_end = "</param>"
    template_marks = (invoke, parameter)
    markers = ()

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """An element for each call."""
        tags = ArgumentTags([cls.parameter], [minimax_m2.NAME_END], [cls.parameter_end])
        functions = TaggedRules(rules, tags).write([], [minimax_m2.NAME_END], [cls.invoke_end])
        return f"""
calls: {rules.last("call", chr(10))}
call: {rules.text(cls.invoke)} function
auto: {"(lead function)* TEXT" if rules.parallel else "TEXT | lead function"}
{rules.text_before(cls.invoke)}
{functions}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while (yield from reader.copy_until((self.invoke,), self._write_content)):
            held: list[str] = []
            yield from self._read_invoke(held)
            self._give_up("".join(held), is_markup=True)

    def _read_text(self, key: str, is_text: bool) -> Steps[bool]:
        if not (yield from self._reader.take_literal(_CDATA)):
            return (yield from super()._read_text(key, is_text))
        return (yield from self._read_value(key, (_CDATA_END + self.parameter_end,), is_text=is_text))
