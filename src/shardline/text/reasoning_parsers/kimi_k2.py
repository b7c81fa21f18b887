"""Kimi K2 Thinking: an answer begins with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<think>…</think>`. Kimi K2 without this name does not reason."""

    begin = "<think>"
    end = "</think>"
    ends_at_calls = True
    free_begins_unmarked = True
