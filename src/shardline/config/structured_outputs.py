"""vLLM's `structured_outputs_config`: what answers in JSON are like if their requests leave it open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KEY = "disable_any_whitespace"
_VLLM_KEYS = ("backend", "disable_fallback", "disable_additional_properties", "reasoning_parser", "enable_in_reasoning")
"""Keys that set nothing here: there is one follower of grammars."""


def read_structured_outputs_config(given: str | Mapping[str, Any] | None) -> bool | None:
    """The `disable_any_whitespace` of requests that do not say it, from an object or its JSON. None: answers with a
    schema are compact, and free objects are not.

    Raises:
        ValueError: it is malformed.
    """
    if given is None:
        return None
    values: Any = given
    if isinstance(given, str):
        try:
            values = json.loads(given)
        except ValueError:
            values = None
    if not isinstance(values, Mapping) or not isinstance(values.get(_KEY), bool | None):
        raise ValueError(
            f"""structured_outputs_config must be '{{"{_KEY}": true}}' or the same with false, got {given!r}"""
        )
    if unknown := sorted(set(values) - {_KEY, *_VLLM_KEYS}):
        raise ValueError(f"structured_outputs_config has the unknown key {unknown[0]!r}; known: {_KEY}")
    disabled: bool | None = values.get(_KEY)
    return disabled
