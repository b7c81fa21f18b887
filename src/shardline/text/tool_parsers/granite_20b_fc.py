"""Granite 20B for function calling: `<function_call> {"name": …, "arguments": …}`, one mark for each call."""

from __future__ import annotations

from shardline.text.tool_parsers import hermes


class Parser(hermes.Parser):
    """A call ends with its object."""

    other_names = ("granite-20b-fc",)
    begin = "<function_call>"
    end = ""
    space = (" ", "")
    template_marks = ("<function_call>",)
    markers = ("<function_call>",)
