"""Seed-OSS: Qwen3-Coder's format with an outer tag of its own, and without lines around values."""

from __future__ import annotations

from shardline.text.tool_parsers import qwen3_coder


class Parser(qwen3_coder.Parser):
    """`<seed:tool_call><function=name><parameter=key>…</parameter></function></seed:tool_call>`."""

    other_names = ()
    begin = "<seed:tool_call>"
    end = "</seed:tool_call>"
    template_marks = ("<seed:tool_call>",)
    markers = ("<seed:tool_call>", "</seed:tool_call>")
    value_space = ""
