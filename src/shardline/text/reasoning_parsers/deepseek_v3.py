"""DeepSeek V3.1: an answer has reasoning only if the prompt begins it, or the model marks it."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<think>…</think>`. Unless thinking is asked for, the prompt ends with the second mark."""

    other_names = ("hy_v3", "hy_v4", "poolside_v1")
    begin = "<think>"
    end = "</think>"
    ends_at_calls = True
