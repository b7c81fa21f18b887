"""GLM-4.5 and later: an answer begins with reasoning, unless that is forbidden or a form is required."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<think>…</think>`. With enable_thinking=False the prompt ends with both marks."""

    other_names = ("glm45", "glm47", "ling3")
    begin = "<think>"
    end = "</think>"
    ends_at_calls = True
    free_begins_unmarked = True
