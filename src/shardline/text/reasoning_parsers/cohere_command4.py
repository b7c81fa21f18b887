"""Cohere's Command A+: reasoning, and content with other marks than Command A's."""

from __future__ import annotations

from shardline.text.reasoning_parsers import cohere_command3


class Parser(cohere_command3.Parser):
    """`<|START_THINKING|>…<|END_THINKING|><|START_TEXT|>…<|END_TEXT|>`."""

    content_begin = "<|START_TEXT|>"
    content_end = "<|END_TEXT|>"
    dropped = (content_begin, content_end)
    markers = (content_begin, content_end)
