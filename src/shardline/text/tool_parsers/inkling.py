"""Inkling: blocks of a message, `<|content_invoke_tool_json|>{"name": …, "args": …}<|end_message|>` for each call."""

from __future__ import annotations

from shardline.text.tool_parsers import hermes
from shardline.text.tool_parsers.base import CallRules


class Parser(hermes.Parser):
    """What stands around blocks is taken away by the parser of reasoning."""

    other_names = ()
    begin = "<|content_invoke_tool_json|>"
    end = "<|end_message|>"
    arguments_key = "args"
    space = ("", "")
    template_marks = (begin, "<|message_model|>")
    markers = (begin, end)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """A block for each call."""
        functions = rules.function_rules('{"name": "', rules.text('", "args": '), rules.text("}"))
        return f"""
calls: {rules.repeated("call", "")}
call: {rules.mark(cls.begin)} rest
auto: {"(lead rest)* TEXT" if rules.parallel else "TEXT | lead rest"}
rest: function {rules.mark(cls.end)}
{rules.text_before(cls.begin)}
{functions}
"""
