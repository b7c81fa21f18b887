"""Gemma 4: an answer may begin with reasoning in a channel."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<|channel>thought … <channel|>`."""

    begin = "<|channel>thought"
    end = "<channel|>"
    markers = ("<|channel>",)
    ends_at_calls = True
