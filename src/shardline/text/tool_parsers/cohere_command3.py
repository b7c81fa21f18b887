"""Cohere's Command A: `<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": …}, …]<|END_ACTION|>`."""

from __future__ import annotations

from shardline.text.tool_parsers.base import CallRules
from shardline.text.tool_parsers.json_lists import ListParser


class Parser(ListParser):
    """One list with all calls; ids are their numbers."""

    other_names = ("cohere_command4",)
    begins = ("<|START_ACTION|>",)
    end = "<|END_ACTION|>"
    name_key = "tool_name"
    call_form = ('", "tool_name": "', '", "parameters": ', "}")
    template_marks = begins
    markers = ("<|START_ACTION|>", "<|END_ACTION|>")

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """The list, with any ids."""
        before, between, after = cls.call_form
        first, last = (rules.mark(mark) for mark in cls.markers)
        more = ' ("," GAP? call)*' if rules.parallel else ""
        return f"""
calls: {first} rest
auto: TEXT | lead rest
rest: "[" GAP? call{more} GAP? "]" {last}
call: {rules.text('{"tool_call_id": "')} ID function
ID: /[0-9]{{1,3}}/
GAP: /[ \\n]{{1,8}}/
{rules.text_before(cls.begins[0])}
{rules.function_rules(before, rules.text(between), rules.text(after))}
"""
