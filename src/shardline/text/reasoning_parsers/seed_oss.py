"""Seed-OSS: an answer may begin with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<seed:think>…</seed:think>`."""

    begin = "<seed:think>"
    end = "</seed:think>"
    ends_at_calls = True
