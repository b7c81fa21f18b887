"""Qwen3, GLM-4.5 and others: an answer begins with reasoning, unless that is forbidden or a form is required."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Parser(ReasoningParser):
    """`<think>…</think>`. With enable_thinking=False the prompt ends with both marks."""

    other_names = (
        "deepseek_v4", "deepseek_v41", "glm4_moe", "glm45", "glm47", "kimi_k2", "ling3", "mimo", "minicpmv",
        "nemotron_v3", "step3p5",
    )  # fmt: skip
    begin = "<think>"
    end = "</think>"
    ends_at_calls = True
    free_begins_unmarked = True
