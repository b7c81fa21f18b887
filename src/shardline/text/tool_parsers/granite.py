"""Granite 3: `<|tool_call|> [{"name": …, "arguments": …}, …]`."""

from __future__ import annotations

from shardline.text.tool_parsers.json_lists import ListParser


class Parser(ListParser):
    """Granite 3.0 has a token for the mark, Granite 3.1 writes it as text."""

    begins = ("<|tool_call|>", "<tool_call>")
    template_marks = ("<|tool_call|>", "<|start_of_role|>")
    markers = ("<|tool_call|>", "<tool_call>")
