"""InternLM: `<|action_start|><|plugin|>{"name": …, "parameters": …}<|action_end|>`."""

from __future__ import annotations

from shardline.text.tool_parsers import hermes


class Parser(hermes.Parser):
    """A call has two marks before it."""

    other_names = ()
    begin = "<|action_start|>"
    after_begin = "<|plugin|>"
    end = "<|action_end|>"
    arguments_key = "parameters"
    template_marks = ("<|action_start|>", "<|plugin|>")
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
