"""Granite 3.2: reasoning between sentences."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`Here is my thought process: … Here is my response: …`."""

    begin = "Here is my thought process:"
    end = "Here is my response:"
    other_begins = ("Here's my thought process:",)
    other_ends = ("Here's my response:",)
