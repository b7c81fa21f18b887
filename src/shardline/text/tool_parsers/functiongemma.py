"""FunctionGemma: Gemma 4's format with marks of its own."""

from __future__ import annotations

from shardline.text.tool_parsers import gemma4


class Parser(gemma4.Parser):
    """`<start_function_call>call:name{key:<escape>text<escape>,count:3}<end_function_call>`, one after another."""

    begin = "<start_function_call>"
    end = "<end_function_call>"
    quote = "<escape>"
    template_marks = (begin, quote)
    markers = (begin, end, quote)
