"""Llama 3.1 and later: the whole answer is `{"name": …, "parameters": …}`; several calls are separated by `;`."""

from __future__ import annotations

import re

from shardline.structured.grammar import lark_text
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser

_TAG = "<|python_tag|>"


class Parser(ToolParser):
    """An answer is a call if it begins with an object whose `name` is an offered function. Other JSON is content."""

    other_names = ("llama4_json",)
    template_marks = ('"parameters"', "ipython")
    markers = (_TAG,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """Content is all that does not begin like the call of an offered function."""
        tag = f"{rules.mark(_TAG)}? " if _TAG in rules.special_tokens else ""
        names = "|".join(re.escape(function.name) for function in rules.functions)
        return f"""
calls: {rules.repeated("function", "; ")}
auto: {tag}calls | CONTENT
CONTENT: /(.|\\n)*/ & ~/[ \\n]*\\{{"name": "({names})"(.|\\n)*/
{rules.function_rules('{"name": "', lark_text('", "parameters": '), lark_text("}"))}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        space = ""
        while (char := (yield from reader.peek())).isspace():
            yield from reader.take_literal(char)
            space += char
        if (yield from reader.take_literal(_TAG)):
            yield from reader.skip_space()
        else:
            self._write_content(space)
        while (yield from reader.peek()) == "{" and (yield from self._read_call(known_names_only=True)):
            yield from reader.skip_space()
            while (yield from reader.take_literal(";")) or (yield from reader.take_literal(",")):
                yield from reader.skip_space()
            if (yield from reader.take_literal(_TAG)):
                yield from reader.skip_space()
        while (yield from reader.copy_until((_TAG,), self._write_content)):
            pass
