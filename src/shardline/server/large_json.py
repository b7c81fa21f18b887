"""Large JSON bodies: parsed within bounds, and without holding up other threads.

The parser runs no other thread while it is at work. So long texts with escapes, and long arrays of numbers, are parsed
in slices and put where they belong afterwards; bounds hold for the rest.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, Literal

import pydantic_core

from shardline.server.errors import bad_request

MAX_VALUES = 1_000_000
MAX_OBJECTS = 16_384
"""Objects and arrays."""
MAX_MEMBERS = 50_000
"""Members of all objects."""
MAX_STRINGS = 250_000
MAX_BARE_BYTES = 6 << 20
"""Bytes outside strings. Numbers take long if they have many digits."""

SLICE_BYTES = 64 * 1024
"""What is parsed at once; also the length of a text that counts as long, and of a body that is parsed on a thread."""
ARRAY_BYTES = 4 * 1024
"""The length of an array that counts as long: a body may have many of them."""
COUNTED_BYTES = 1 << 20
"""What is counted at once: other threads run between two slices."""

_STRING_PART = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_WHOLE_PARTS = re.compile(rb"(?:[^\\]+|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\[^u])*", re.DOTALL)
"""Characters and escapes; two escapes that are one pair of surrogates belong together."""


def check_size(body: bytes) -> None:
    """Refuse a body whose JSON has too many values, before it is parsed. Call it on a thread.

    Raises:
        ApiError: 400.
    """
    size = _Size()
    size.add(body, 0, len(body))
    size.num_strings //= 2  # each has two quotes
    # Texts may contain these characters too, so only if there are many it matters where they stand.
    if not size.is_beyond:
        return
    size = _Size()
    position = num_strings = 0
    for start, end in _strings_of(body):
        size.add(body, position, start - 1)
        position = end + 1
        num_strings += 1
        size.num_strings = num_strings
        if size.is_beyond:
            break
    size.add(body, position, len(body))
    size.num_strings = num_strings
    if size.is_beyond:
        raise bad_request(
            f"The JSON of the request has more than {MAX_VALUES} values, {MAX_STRINGS} strings, {MAX_OBJECTS} objects "
            f"and arrays, {MAX_MEMBERS} members of objects, or {MAX_BARE_BYTES} bytes outside strings.",
            code="request_too_large",
        )


class _Size:
    """The numbers of what separates values in JSON."""

    def __init__(self) -> None:
        self.num_strings = 0
        self._num_values = self._num_objects = self._num_members = self._num_bytes = 0

    @property
    def is_beyond(self) -> bool:
        """Whether a bound is exceeded."""
        return (
            self._num_values > MAX_VALUES
            or self._num_objects > MAX_OBJECTS
            or self._num_members > MAX_MEMBERS
            or self.num_strings > MAX_STRINGS
            or self._num_bytes > MAX_BARE_BYTES
        )

    def add(self, body: bytes, start: int, end: int) -> None:
        """Count what is in body[start:end]."""
        for first in range(start, end, COUNTED_BYTES):
            last = min(first + COUNTED_BYTES, end)
            self._num_bytes += last - first
            self._num_values += body.count(b",", first, last)
            self._num_objects += body.count(b"{", first, last) + body.count(b"[", first, last)
            self._num_members += body.count(b":", first, last)
            self.num_strings += body.count(b'"', first, last)


def parse_slices(body: bytes) -> Any:
    """The value of a long JSON text; see `json_body.parse_json`."""
    places = list(_long_parts(body))
    if not places:
        return _parse_rest(body)
    mark = secrets.token_hex(16)
    parts: list[bytes] = []
    parts_by_name: dict[str, Any] = {}
    end = 0
    for number, (start, stop, is_text) in enumerate(places):
        if is_text and body[stop : stop + 1] != b'"':
            body = body[:start]  # This string has no end, so what precedes it is no JSON either.
            break
        name = f"{mark}{number}"
        parts_by_name[name] = _parse_text(body, start, stop) if is_text else _parse_entries(body, start, stop)
        parts += [body[end:start], name.encode() if is_text else b'"%b"' % name.encode()]
        end = stop
    return _restore(_parse_rest(b"".join([*parts, body[end:]])), parts_by_name)


def _parse_rest(body: bytes) -> Any:
    # A cache of strings makes many different ones twice as slow, and nothing else runs meanwhile.
    cache: Literal["none", "all"] = "none" if len(body) > SLICE_BYTES else "all"
    return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings=cache)


def _strings_of(body: bytes) -> Iterator[tuple[int, int]]:
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
    for start, end in _strings_of(body):
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


def _restore(value: Any, parts: dict[str, Any]) -> Any:
    """The value with the long parts in their places."""
    if isinstance(value, str):
        return parts.get(value, value)
    if isinstance(value, list):
        entries = [_restore(entry, parts) for entry in value]
        is_cut_out = len(value) == 1 and isinstance(value[0], str) and isinstance(entries[0], list)
        return entries[0] if is_cut_out else entries  # an array that was cut out has left its brackets
    if isinstance(value, dict):
        return {parts.get(name, name): _restore(entry, parts) for name, entry in value.items()}
    return value
