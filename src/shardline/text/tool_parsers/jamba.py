"""Jamba and Hunyuan A13B: `<tool_calls>[{"name": …, "arguments": …}, …]</tool_calls>`."""

from __future__ import annotations

from shardline.text.tool_parsers.json_lists import ListParser


class Parser(ListParser):
    """One element with the list of all calls."""

    other_names = ("hunyuan_a13b",)
    begins = ("<tool_calls>",)
    end = "</tool_calls>"
    template_marks = ("<tool_calls>", "</tool_calls>")
    markers = ("<tool_calls>", "</tool_calls>")
