"""Muse Glimmer: MiniMax M2's format with marks of its own, in messages to the tool."""

from __future__ import annotations

from shardline.text.tool_parsers import minimax_m2
from shardline.text.tool_parsers.base import CallRules


class Parser(minimax_m2.Parser):
    """`<atem:function_calls><atem:invoke name="…">…`; the parser of reasoning takes the headers of messages away.

    A function without a namespace is also called by its name with the same name before it.
    """

    begins = ("<atem:function_calls>",)
    ends = ("</atem:function_calls>",)
    invoke = '<atem:invoke name="'
    invoke_end = "</atem:invoke>"
    parameter = '<atem:parameter name="'
    parameter_end = "</atem:parameter>"
    template_marks = begins
    markers = (*begins, *ends, "<|start|>", "<|message|>")

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """As the model writes them behind the header of a message, which may name any tool."""
        written = super().write_rules(rules).replace("calls: ", "calls: header? ", 1)
        written = written.replace("auto: TEXT | lead rest", "auto: header? TEXT | header? lead rest", 1)
        header = f'({rules.mark("<|start|>")} "assistant")? TO {rules.mark("<|message|>")}'
        return f"{written}\nheader: {header}\nTO: / ?to=[A-Za-z0-9_.-]{{1,64}}/\n"

    def _start_tagged_call(self, name: str) -> None:
        first, _, second = name.partition(".")
        is_doubled = first == second and name not in self._functions and first in self._functions
        super()._start_tagged_call(first if is_doubled else name)
