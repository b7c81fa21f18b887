"""LFM2: `<|tool_call_start|>[name(key=value, …), …]<|tool_call_end|>`."""

from __future__ import annotations

from shardline.text.tool_parsers.literals import LiteralParser


class Parser(LiteralParser):
    """Values are Python's literals."""

    begin = "<|tool_call_start|>"
    end = "<|tool_call_end|>"
    template_marks = ("<|tool_call_start|>",)
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
