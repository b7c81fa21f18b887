"""dots: MiniMax M2's format with a mark of its own."""

from __future__ import annotations

from shardline.text.tool_parsers import minimax_m2


class Parser(minimax_m2.Parser):
    """`<dots_function_call><invoke name="…"><parameter name="…">…</parameter></invoke></dots_function_call>`."""

    begins = ("<dots_function_call>",)
    ends = ("</dots_function_call>",)
    template_marks = begins
    markers = begins + ends
