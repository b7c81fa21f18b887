"""Step 3: invocations between marks of their own."""

from __future__ import annotations

from shardline.text.tool_parsers import minimax_m2


class Parser(minimax_m2.Parser):
    """`<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="…">…</steptml:invoke><｜tool_call_end｜>`."""

    begins = ("<｜tool_calls_begin｜>",)
    ends = ("<｜tool_calls_end｜>",)
    invoke = '<steptml:invoke name="'
    invoke_end = "</steptml:invoke>"
    parameter = '<steptml:parameter name="'
    parameter_end = "</steptml:parameter>"
    before_call = ("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>")
    after_call = ("<｜tool_call_end｜>",)
    line = ""
    template_marks = begins
    markers = (*begins, *ends, "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
