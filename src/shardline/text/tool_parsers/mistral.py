"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}, …]`, and from tokenizer v11 on `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import string

from shardline.structured.grammar import lark_text
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ALPHABET = string.ascii_letters + string.digits


class Parser(ToolParser):
    """Calls end the answer. Both forms are understood, whichever the tokenizer has."""

    template_marks = (_BEGIN,)
    markers = (_BEGIN, _ID, _ARGUMENTS)

    @staticmethod
    def call_id(source: bytes) -> str:
        """Nine letters and digits: Mistral's templates refuse anything else."""
        return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in source[:9])

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The first mark."""
        return (_BEGIN,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """With a mark before the arguments if the tokenizer has one, else as a list."""
        if _ARGUMENTS in rules.special_tokens:
            rest = "function"
            calls = f"call{'+' if rules.parallel else ''}"
            after = " call*" if rules.parallel else ""
            functions = rules.function_rules("", rules.mark(_ARGUMENTS), "")
        else:
            rest = f'"[" {rules.repeated("function", ", ")} "]"'
            calls, after = "call", ""
            functions = rules.function_rules('{"name": "', lark_text('", "arguments": '), lark_text("}"))
        return f"""
calls: {calls}
call: {rules.mark(_BEGIN)} rest
auto: TEXT | lead rest{after}
rest: {rest}
{rules.text_before(_BEGIN)}
{functions}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while (yield from reader.copy_until((_BEGIN,), self._write_content)):
            yield from reader.skip_space()
            if (yield from reader.take_literal("[")):
                yield from self._read_list()
            else:
                yield from self._read_named_call()

    def _read_named_call(self) -> Steps[None]:
        reader = self._reader
        name: list[str] = []
        mark = yield from reader.copy_until((_ARGUMENTS, _ID, "{", _BEGIN), name.append)
        if mark == _ID:
            mark = yield from reader.copy_until((_ARGUMENTS, "{", _BEGIN), lambda text: None)
        if mark in ("{", _BEGIN):
            reader.unread(mark)
        if not mark or mark == _BEGIN:
            self._give_up("".join(name), is_markup=True)
            return
        yield from reader.skip_space()
        self._start_call("".join(name).strip())
        if (yield from self._read_arguments()):
            self._end_call()
