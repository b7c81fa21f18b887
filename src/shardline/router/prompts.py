"""What of a request's body becomes its prompt: backends whose caches know its beginning compute less of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt", "token_ids")
"""In about the order in which chat templates write them."""
_SESSION_FIELDS = ("prompt_cache_key", "user")
"""Hints that requests have a past in common."""


_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens": ?([0-9]{1,9})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens": ?([0-9]{1,9})')


@dataclass(frozen=True)
class Prompt:
    """What the router reads of a body."""

    model: str = ""
    text: bytes = b""
    """Equal beginnings of prompts have equal beginnings here."""
    salt: str = ""
    """Prompts with unlike ones share nothing."""
    session: str = ""
    """Requests with equal ones may share more than their beginnings say."""
    token_ids: Sequence[int] | None = None
    """The prompt, if the client sends it so."""
    asks_for_stream: bool = False
    """The body asks for a stream, and does not say itself with what it goes on."""
    priority: int = 0
    """Requests with the least one go first."""
    previous_response: str = ""
    """The id of the response that it continues."""


def read_prompt(body: bytes, session: str = "") -> Prompt:
    """The prompt of a request; an empty one if the body is no JSON object: the backend will say so.

    `session`: what a header says of it.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prompt()
    if not isinstance(fields, dict):
        return Prompt()
    parts: list[bytes] = []
    for name in _PROMPT_FIELDS:
        value = fields.get(name)
        if value:
            parts.append(_bytes_of(value))
    hints = [session, *(_short(fields.get(name)) for name in _SESSION_FIELDS)]
    token_ids = fields.get("token_ids") or fields.get("prompt")
    are_ids = isinstance(token_ids, list) and all(type(one) is int for one in token_ids)
    return Prompt(
        _short(fields.get("model")),
        b"\n".join(parts),
        _short(fields.get("cache_salt")),
        next(filter(None, hints), ""),
        token_ids if are_ids else None,
        fields.get("stream") is True and "resume" not in fields,
        priority if type(priority := fields.get("priority")) is int else 0,
        _short(fields.get("previous_response_id")),
    )


def _short(value: Any) -> str:
    return value[:512] if isinstance(value, str) else ""


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return msgspec.json.encode(value)


def cached_share(answer: bytes) -> float | None:
    """The share of its prompt that an answer says was cached, by its `usage`; None: it does not say."""
    tokens, cached = _PROMPT_TOKENS.search(answer), _CACHED_TOKENS.search(answer)
    if tokens is None or cached is None or int(tokens[1]) == 0:
        return None
    return min(1.0, int(cached[1]) / int(tokens[1]))
