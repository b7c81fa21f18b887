"""Mistral's reasoning models: an answer may begin with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`[THINK]…[/THINK]`: both marks are special tokens."""

    begin = "[THINK]"
    end = "[/THINK]"
    ends_at_calls = True
