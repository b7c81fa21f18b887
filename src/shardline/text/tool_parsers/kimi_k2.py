"""Kimi K2: calls between marks, each with an id `functions.name:index` and its arguments."""

from __future__ import annotations

from shardline.structured.grammar import lark_text
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers import deepseek_v3
from shardline.text.tool_parsers.base import CallRules

_FIRST, _LAST = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _SEPARATOR, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAMESPACE = "functions."


class Parser(deepseek_v3.Parser):
    """Calls follow one another in one section after the content."""

    other_names = ()
    template_marks = (_FIRST,)
    markers = (_FIRST, _LAST, _BEGIN, _SEPARATOR, _END)

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The first mark."""
        return (_FIRST,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """In the form that the chat template shows."""
        between = f"{lark_text(':')} INDEX {rules.mark(_SEPARATOR)}"
        return f"""
calls: {rules.mark(_FIRST)} rest
auto: TEXT | lead rest
rest: {rules.repeated("call", "")} {rules.mark(_LAST)}
call: {rules.mark(_BEGIN)} function {rules.mark(_END)}
INDEX: /[0-9]{{1,3}}/
{rules.text_before(_FIRST)}
{rules.function_rules(_NAMESPACE, between, "")}
"""

    def _read_name(self, before: str) -> Steps[str | None]:
        yield from ()  # nothing more is read
        name, _, index = before.strip().removeprefix(_NAMESPACE).rpartition(":")
        return name or index
