"""Prompts of texts that stand between two others, as models that were trained for it expect them."""

from __future__ import annotations

from shardline.text.tokenizer import Tokenizer

_FORMATS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen, Granite
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # DeepSeek
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
    "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",  # Code Llama
)


def middle_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str | None:
    """The prompt of the text between `prefix` and `suffix`; None: the tokenizer has no tokens for this."""
    for form in _FORMATS:
        marks = form.replace("{prefix}", "{suffix}").split("{suffix}")
        if all(tokenizer.token_id(mark) is not None for mark in marks if mark):
            return form.format(prefix=prefix, suffix=suffix)
    return None
