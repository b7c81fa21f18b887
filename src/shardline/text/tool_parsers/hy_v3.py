"""Hunyuan 3: GLM-4.5's format in an outer element, and with a mark behind names."""

from __future__ import annotations

from shardline.text.tool_parsers import glm4_moe


class Parser(glm4_moe.Parser):
    """`<tool_calls><tool_call>name<tool_sep><arg_key>…</arg_key><arg_value>…</arg_value></tool_call></tool_calls>`."""

    other_names = ()
    outer = ("<tool_calls>", "</tool_calls>")
    name_end = "<tool_sep>"
    template_marks = ("<tool_calls>", "<tool_sep>", "<arg_key>", "<arg_value>")
    markers = (*glm4_moe.Parser.markers, *outer, name_end)
