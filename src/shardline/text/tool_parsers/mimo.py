"""MiMo: Qwen3-Coder's format without lines around values."""

from __future__ import annotations

from shardline.text.tool_parsers import qwen3_coder


class Parser(qwen3_coder.Parser):
    """`<tool_call><function=name><parameter=key>…</parameter></function></tool_call>`."""

    other_names = ()
    template_marks = (*qwen3_coder.Parser.template_marks, "MiMo")
    value_space = ""
