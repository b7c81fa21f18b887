"""Qwen3: an answer may begin with reasoning."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<think>…</think>`. With enable_thinking=False the prompt ends with both marks."""

    other_names = (
        "deepseek_v3", "deepseek_v4", "deepseek_v41", "hy_v3", "hy_v4", "mimo", "minicpmv", "nemotron_v3", "step3p5",
    )  # fmt: skip
    begin = "<think>"
    end = "</think>"
    ends_at_calls = True
