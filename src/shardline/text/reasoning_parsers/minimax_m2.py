"""MiniMax M2: an answer begins with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<think>…</think>`. The first mark is part of the prompt."""

    begin = "<think>"
    end = "</think>"
    ends_at_calls = True
