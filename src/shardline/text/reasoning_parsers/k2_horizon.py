"""K2 Horizon: reasoning between marks that tell its effort."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<ifm|think>…</ifm|think>`, or `think_fast` and `think_faster`. The first mark is part of the prompt."""

    begin = "<ifm|think>"
    end = "</ifm|think>"
    other_begins = ("<ifm|think_fast>", "<ifm|think_faster>")
    other_ends = ("</ifm|think_fast>", "</ifm|think_faster>")
    markers = other_begins + other_ends
