"""Granite with thinking: reasoning, and content with marks of its own."""

from __future__ import annotations

from shardline.text.reasoning_parsers.enclosed import EnclosedParser


class Parser(EnclosedParser):
    """`<think>…</think><response>…</response>`."""

    content_begin = "<response>"
    content_end = "</response>"
    markers = ("<response>", "</response>")
