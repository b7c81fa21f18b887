"""DeepSeek R1 and models distilled from it: every answer begins with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<think>…</think>`. The first mark is often part of the prompt, or missing."""

    other_names = ("holo2", "olmo3", "step3")
    begin = "<think>"
    end = "</think>"
    begins_unmarked = True
