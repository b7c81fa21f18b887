"""GLM-4.5 and later: an answer may begin with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<think>…</think>`. With enable_thinking=False the prompt ends with both marks."""

    other_names = ("glm45", "glm47", "ling3", "poolside_v1")
    begin = "<think>"
    end = "</think>"
    ends_at_calls = True
