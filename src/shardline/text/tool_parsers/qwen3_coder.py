"""Qwen3-Coder: `<tool_call><function=name>` with `<parameter=key>…</parameter>`, one element for each call."""

from __future__ import annotations

from typing import ClassVar

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules
from shardline.text.tool_parsers.tagged import NAME, ArgumentTags, TaggedParser, TaggedRules

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_END = ">"


class Parser(TaggedParser):
    """Every tag and every value has lines of its own. Some models leave out the outer tag."""

    other_names: ClassVar[tuple[str, ...]] = ("qwen3_xml", "step3p5")
    begin: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = "</tool_call>"
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_call>", _FUNCTION, _PARAMETER)
    markers = ("<tool_call>", "</tool_call>")
    value_space: ClassVar[str] = "\n"
    """What stands between a value and its tags."""

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The first mark."""
        return (cls.begin,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """An element for each call."""
        space = cls.value_space
        tags = ArgumentTags([_PARAMETER], [_NAME_END, space], [space + _PARAMETER_END, "\n"])
        functions = TaggedRules(rules, tags).write(["\n", _FUNCTION], [_NAME_END, "\n"], [_FUNCTION_END, "\n"])
        return f"""
calls: {rules.last("call", chr(10))}
call: {rules.mark(cls.begin)} rest
auto: {"(lead rest)* TEXT" if rules.parallel else "TEXT | lead rest"}
rest: function {rules.mark(cls.end)}
{rules.text_before(cls.begin)}
{functions}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while mark := (yield from reader.copy_until((self.begin, self.end, _FUNCTION), self._write_content)):
            if mark == self.begin:
                yield from reader.skip_space()
                mark = _FUNCTION if (yield from reader.take_literal(_FUNCTION)) else mark
            if mark == _FUNCTION:
                yield from self._read_function()

    def _read_function(self) -> Steps[None]:
        reader = self._reader
        words: list[str] = []
        mark = yield from reader.copy_until((_NAME_END, "\n", self.end), words.append)
        if mark != _NAME_END or not NAME.fullmatch("".join(words)):
            self._give_up("".join(words), is_markup=True)
            return
        self._start_tagged_call("".join(words))
        ends = (_PARAMETER, _FUNCTION_END, _FUNCTION, self.end, self.begin)
        value_ends = tuple({self.value_space + _PARAMETER_END, _PARAMETER_END})
        while (mark := (yield from reader.copy_until(ends, lambda text: None))) == _PARAMETER:
            key: list[str] = []
            if not (yield from reader.copy_until((_NAME_END,), key.append)):
                return
            yield from reader.take_literal(self.value_space)
            if not (yield from self._read_value("".join(key), value_ends)):
                return
        if mark:
            self._end_tagged_call()
        if mark != _FUNCTION_END:
            reader.unread(mark)
