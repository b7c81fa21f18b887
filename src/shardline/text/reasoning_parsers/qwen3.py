"""Qwen3: an answer may begin with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<think>…</think>`. With enable_thinking=False the prompt ends with both marks."""

    other_names = ("deepseek_v3", "mimo", "nemotron_v3", "step3p5")
    begin = "<think>"
    end = "</think>"
