"""Formats of reasoning that are two marks and nothing else."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser


class Think(ReasoningParser):
    """`<think>…</think>`. The first mark may be part of the prompt, or both if it forbids reasoning."""

    begin = "<think>"
    end = "</think>"


class DeepSeekR1(Think):
    """Every answer begins with reasoning. The first mark is often part of the prompt, or missing."""

    begins_unmarked = True


class Mistral(ReasoningParser):
    """`[THINK]…[/THINK]`: both marks are special tokens."""

    begin = "[THINK]"
    end = "[/THINK]"


class SeedOss(ReasoningParser):
    """`<seed:think>…</seed:think>`."""

    begin = "<seed:think>"
    end = "</seed:think>"


FORMATS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1,
    "glm4_moe": Think,
    "kimi_k2": Think,
    "minimax_m2": Think,
    "mistral": Mistral,
    "qwen3": Think,
    "seed_oss": SeedOss,
}
"""The parsers by the names of their formats."""
