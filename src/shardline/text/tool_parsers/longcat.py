"""LongCat: Hermes' format with a mark of its own."""

from __future__ import annotations

from shardline.text.tool_parsers import hermes


class Parser(hermes.Parser):
    """`<longcat_tool_call>{"name": …, "arguments": …}</longcat_tool_call>`."""

    other_names = ()
    begin = "<longcat_tool_call>"
    end = "</longcat_tool_call>"
    template_marks = ("<longcat_tool_call>",)
    markers = ("<longcat_tool_call>", "</longcat_tool_call>")
