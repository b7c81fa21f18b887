"""ERNIE 4.5: every answer begins with reasoning, and the content may have marks of its own."""

from __future__ import annotations

from shardline.text.reasoning_parsers.enclosed import EnclosedParser


class Parser(EnclosedParser):
    """`<think>…</think><response>…</response>`. The first mark is often part of the prompt."""

    begins_unmarked = True
    content_begin = "<response>"
    content_end = "</response>"
    markers = ("<response>", "</response>")
