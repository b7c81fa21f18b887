"""Hunyuan A13B: reasoning, and content with marks of its own."""

from __future__ import annotations

from shardline.text.reasoning_parsers.enclosed import EnclosedParser


class Parser(EnclosedParser):
    """`<think>…</think><answer>…</answer>`."""

    content_begin = "<answer>"
    content_end = "</answer>"
    markers = ("<answer>", "</answer>")
