"""Cohere's Command A: reasoning, and content with marks of its own."""

from __future__ import annotations

from shardline.text.reasoning_parsers.enclosed import EnclosedParser


class Parser(EnclosedParser):
    """`<|START_THINKING|>…<|END_THINKING|><|START_RESPONSE|>…<|END_RESPONSE|>`. The prompt may end within a part."""

    begin = "<|START_THINKING|>"
    end = "<|END_THINKING|>"
    content_begin = "<|START_RESPONSE|>"
    content_end = "<|END_RESPONSE|>"
    dropped = (content_begin, content_end)
    markers = (content_begin, content_end)
