"""Prompts for a text between two others."""

from __future__ import annotations

import json

import pytest

from shardline.server.openai.completions.request import middle_prompt
from tests.text.builders import byte_level_json, tokenizer


def with_tokens(*tokens: str) -> str:
    source = json.loads(byte_level_json())
    first = max(source["model"]["vocab"].values()) + 1
    for index, token in enumerate(tokens):
        added = {"id": first + index, "content": token, "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        source["added_tokens"].append({**added, **flags})
    return json.dumps(source)


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>a{}<|fim_suffix|>b<|fim_middle|>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>a{}<｜fim▁hole｜>b<｜fim▁end｜>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]b[PREFIX]a{}"),
        (("<|fim_prefix|>",), None),
    ],
)
def test_the_tokenizer_tells_the_format(tokens: tuple[str, ...], prompt: str | None) -> None:
    assert middle_prompt(tokenizer(with_tokens(*tokens)), "a{}", "b") == prompt
