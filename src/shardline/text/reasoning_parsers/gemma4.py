"""Gemma 4: an answer may begin with reasoning in a channel."""

from __future__ import annotations

from collections.abc import Callable

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<|channel>thought … <channel|>`."""

    begin = "<|channel>thought"
    end = "<channel|>"
    markers = ("<|channel>",)

    @classmethod
    def spell_begin(cls, begin: str, mark: Callable[[str], str]) -> str:
        """A token and a text."""
        return f'{mark("<|channel>")} "thought"'
