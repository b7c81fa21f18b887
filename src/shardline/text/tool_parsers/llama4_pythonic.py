"""Llama 4: calls as Python writes them, perhaps between marks."""

from __future__ import annotations

from shardline.text.tool_parsers import pythonic


class Parser(pythonic.Parser):
    """`<|python_start|>[name(key=value, …), …]<|python_end|>`."""

    template_marks = ("<|python_start|>",)
    markers = ("<|python_start|>", "<|python_end|>")
