"""MiniMax M3: an answer may begin with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<mm:think>…</mm:think>`. The first mark may be part of the prompt."""

    begin = "<mm:think>"
    end = "</mm:think>"
