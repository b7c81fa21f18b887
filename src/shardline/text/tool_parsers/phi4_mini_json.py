"""Phi-4-mini: `functools[{"name": …, "arguments": …}, …]`."""

from __future__ import annotations

from shardline.text.tool_parsers.json_lists import ListParser


class Parser(ListParser):
    """The mark is text."""

    begins = ("functools[",)
    template_marks = ("functools[",)
    markers = ()
