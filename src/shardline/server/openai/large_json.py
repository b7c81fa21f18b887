"""Parsing of large JSON without holding up other threads: the parser runs none while it is at work.

Long texts with escapes, and long arrays of numbers, are parsed in slices and put where they belong afterwards.
`check_json_size` bounds the rest.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, Literal

import pydantic_core

SLICE_BYTES = 64 * 1024
"""What is parsed at once; also the length of a text that counts as long."""

ARRAY_BYTES = 4 * 1024
"""The length of an array that counts as long: a body may have many of them."""

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
    places = list(_long_parts(body)) if len(body) > SLICE_BYTES else []
    if not places:
        return _parse_whole(body)
    mark = secrets.token_hex(16)
    parts: list[bytes] = []
    found: dict[str, Any] = {}
    end = 0
    for number, (start, stop, is_text) in enumerate(places):
        if is_text and body[stop : stop + 1] != b'"':
            body = body[:start]  # This string has no end, so what precedes it is no JSON either.
            break
        name = f"{mark}{number}"
        found[name] = _parse_text(body, start, stop) if is_text else _parse_entries(body, start, stop)
        parts += [body[end:start], name.encode() if is_text else b'"%b"' % name.encode()]
        end = stop
    return _restore(_parse_whole(b"".join([*parts, body[end:]])), found)


def _parse_whole(body: bytes) -> Any:
    # A cache of strings makes many different ones twice as slow, and nothing else runs meanwhile.
    cache: Literal["none", "all"] = "none" if len(body) > SLICE_BYTES else "all"
    return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings=cache)


def strings_of(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the content of each string begins and ends. The last one may lack its quote."""
    position = body.find(b'"')
    while position >= 0:
        end = _end_of_string(body, position + 1)
        yield position + 1, end
        position = body.find(b'"', end + 1)


def _long_parts(body: bytes) -> Iterator[tuple[int, int, bool]]:
    """Where each part begins and ends that is parsed in slices, and whether it is a text.

    Parts are the content of long strings with escapes, and of long arrays that have no strings and no arrays in them.
    The last string may lack its closing quote.
    """
    position = 0
    for start, end in strings_of(body):
        if start - position > ARRAY_BYTES:
            yield from _long_arrays(body, position, start - 1)
        if end - start > SLICE_BYTES and body.find(b"\\", start, end) >= 0:
            yield start, end, True
        position = end + 1
    yield from _long_arrays(body, position, len(body))


def _long_arrays(body: bytes, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
    """The long arrays between two strings."""
    while last - first > ARRAY_BYTES and (close := body.find(b"]", first, last)) >= 0:
        opening = body.rfind(b"[", first, close)
        if opening >= 0 and close - opening > ARRAY_BYTES:
            yield opening + 1, close, False
        first = close + 1


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


def _parse_entries(body: bytes, start: int, stop: int) -> list[Any]:
    """The entries of an array without strings and arrays."""
    entries: list[Any] = []
    while start <= stop:
        # A number may be longer than a slice.
        end = -1 if stop - start <= SLICE_BYTES else body.find(b",", start + SLICE_BYTES, stop)
        piece = body[start : end if end >= 0 else stop]
        if not piece.strip():
            raise ValueError("expected value within an array")
        entries += pydantic_core.from_json(b"[" + piece + b"]", allow_inf_nan=False)
        start = stop + 1 if end < 0 else end + 1
    return entries


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


def _restore(value: Any, found: dict[str, Any]) -> Any:
    """The value with the long parts in their places."""
    if isinstance(value, str):
        return found.get(value, value)
    if isinstance(value, list):
        entries = [_restore(entry, found) for entry in value]
        is_cut_out = len(value) == 1 and isinstance(value[0], str) and isinstance(entries[0], list)
        return entries[0] if is_cut_out else entries  # an array that was cut out has left its brackets
    if isinstance(value, dict):
        return {found.get(name, name): _restore(entry, found) for name, entry in value.items()}
    return value
