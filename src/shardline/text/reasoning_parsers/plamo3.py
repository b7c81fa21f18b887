"""PLaMo 3: an answer may begin with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<|plamo:begin_think:plamo|>…<|plamo:end_think:plamo|>`: tokenizers spell the marks in several tokens."""

    begin = "<|plamo:begin_think:plamo|>"
    end = "<|plamo:end_think:plamo|>"
    markers = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>")
    ends_at_calls = True
