"""OLMo 3: `<function_calls>` with one call `name(key=value, …)` a line."""

from __future__ import annotations

from shardline.text.tool_parsers.literals import LiteralParser


class Parser(LiteralParser):
    """Values are Python's literals, or JSON's."""

    begin = "<function_calls>"
    end = "</function_calls>"
    brackets = ("", "")
    separator = "\n"
    template_marks = ("<function_calls>",)
    markers = ("<function_calls>", "</function_calls>")
