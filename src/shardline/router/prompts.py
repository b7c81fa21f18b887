"""What of a request's body becomes its prompt: backends whose caches know its beginning compute less of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt", "token_ids")
"""In about the order in which chat templates write them."""
_HINT_FIELDS = ("prompt_cache_key", "cache_salt")
"""Requests with unlike values share no prefix."""


@dataclass(frozen=True)
class Prompt:
    """What the router reads of a body."""

    model: str = ""
    text: bytes = b""
    """Equal beginnings of prompts have equal beginnings here."""
    namespace: str = ""
    asks_for_stream: bool = False
    """The body asks for a stream, and does not say itself with what it goes on."""


def read_prompt(body: bytes) -> Prompt:
    """The prompt of a request; an empty one if the body is no JSON object: the backend will say so."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prompt()
    if not isinstance(fields, dict):
        return Prompt()
    model = fields.get("model")
    parts: list[bytes] = []
    for name in _PROMPT_FIELDS:
        value = fields.get(name)
        if value:
            parts.append(_bytes_of(value))
    hints = [str(fields[name])[:512] for name in _HINT_FIELDS if isinstance(fields.get(name), str)]
    name = model if isinstance(model, str) else ""
    asks_for_stream = fields.get("stream") is True and "resume" not in fields
    return Prompt(name, b"\n".join(parts), "\0".join((name, *hints)), asks_for_stream)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return msgspec.json.encode(value)
