"""Parsing of large JSON without holding up other threads: the parser runs none while it is at work.

Long texts with escapes are parsed in slices, and put where they belong afterwards. `check_json_size` bounds the rest.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

import pydantic_core

SLICE_BYTES = 64 * 1024
"""What is parsed at once; also the length of a text that counts as long."""

_STRING_PART = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_WHOLE_PARTS = re.compile(
    rb"(?:[^\\]+|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\[^u])*",
    re.DOTALL,
)
"""Characters and escapes; two escapes that are one pair of surrogates belong together."""


def parse_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or contains NaN, infinity or half a surrogate pair.
    """
    # The standard library's parser accepts NaN and lone surrogates, which break tokenizers and answers.
    places = list(_long_texts(body)) if len(body) > SLICE_BYTES else []
    if not places:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    mark = secrets.token_hex(16)
    parts: list[bytes] = []
    texts: dict[str, str] = {}
    end = 0
    for number, (start, stop) in enumerate(places):
        name = f"{mark}{number}"
        texts[name] = _parse_text(body, start, stop)
        parts += [body[end:start], name.encode()]
        end = stop
    return _restore(pydantic_core.from_json(b"".join([*parts, body[end:]]), allow_inf_nan=False), texts)


def strings_of(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the content of each string begins and ends. The last one may lack its quote."""
    position = body.find(b'"')
    while position >= 0:
        end = _end_of_string(body, position + 1)
        yield position + 1, end
        position = body.find(b'"', end + 1)


def _long_texts(body: bytes) -> Iterator[tuple[int, int]]:
    """The strings that are parsed in slices: long ones with escapes."""
    for start, end in strings_of(body):
        if end - start > SLICE_BYTES and body.find(b"\\", start, end) >= 0 and end < len(body):
            yield start, end


def _end_of_string(body: bytes, position: int) -> int:
    """The place of the quote that ends the string; the body's end if there is none."""
    while position < len(body):
        part = _STRING_PART.match(body, position, position + SLICE_BYTES)
        assert part is not None
        end = part.end()
        if end == position or body[end : end + 1] == b'"':
            return min(end, len(body))
        position = end
    return len(body)


def _parse_text(body: bytes, start: int, stop: int) -> str:
    """The text of a string's content."""
    texts = []
    while start < stop:
        end = stop if stop - start <= SLICE_BYTES else _cut(body, start, start + SLICE_BYTES)
        texts.append(pydantic_core.from_json(b'"' + body[start : end if end > start else stop] + b'"'))
        start = end if end > start else stop
    return "".join(texts)


def _cut(body: bytes, start: int, end: int) -> int:
    """The last place up to `end` that is inside no escape, no pair of surrogates and no character.

    It is `start` if an escape that is none follows, which the parser refuses.
    """
    part = _WHOLE_PARTS.match(body, start, end)
    assert part is not None
    end = part.end()
    while end > start and body[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _restore(value: Any, texts: dict[str, str]) -> Any:
    """The value with the long texts in their places."""
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, list):
        return [_restore(entry, texts) for entry in value]
    if isinstance(value, dict):
        return {texts.get(name, name): _restore(entry, texts) for name, entry in value.items()}
    return value
