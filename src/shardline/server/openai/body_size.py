"""Bounds of the JSON in a body: parsing many small values takes long, and nothing else runs meanwhile."""

from __future__ import annotations

import re

from shardline.server.errors import bad_request

MAX_VALUES = 1_000_000
MAX_OBJECTS = 16_384
"""Objects and arrays."""
MAX_MEMBERS = 50_000
"""Members of all objects."""

_SLICE_BYTES = 1 << 20
"""What is counted at once: other threads run between two slices."""
_STRING_PART = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


def check_json_size(body: bytes) -> None:
    """Refuse a body whose JSON has too many values, before it is parsed. Call it on a thread.

    Raises:
        ApiError: 400.
    """
    counter = _Counter()
    for start in range(0, len(body), _SLICE_BYTES):
        counter.count(body, start, min(len(body), start + _SLICE_BYTES))
    # Texts may contain these characters too, so only if there are many it matters where they stand.
    if counter.is_beyond:
        _check_outside_strings(body)


class _Counter:
    """Counts the characters that separate values."""

    def __init__(self) -> None:
        self._num_values = self._num_objects = self._num_members = 0

    @property
    def is_beyond(self) -> bool:
        """Whether a bound is exceeded."""
        return self._num_values > MAX_VALUES or self._num_objects > MAX_OBJECTS or self._num_members > MAX_MEMBERS

    def count(self, body: bytes, start: int, end: int) -> None:
        """Count those in body[start:end]."""
        self._num_values += body.count(b",", start, end)
        self._num_objects += body.count(b"{", start, end) + body.count(b"[", start, end)
        self._num_members += body.count(b":", start, end)


def _check_outside_strings(body: bytes) -> None:
    counter = _Counter()
    position = 0
    while position < len(body):
        end = min(position + _SLICE_BYTES, len(body))
        quote = body.find(b'"', position, end)
        counter.count(body, position, end if quote < 0 else quote)
        if counter.is_beyond:
            raise bad_request(
                f"The JSON of the request has more than {MAX_VALUES} values, {MAX_OBJECTS} objects and arrays, or "
                f"{MAX_MEMBERS} members of objects.",
                code="request_too_large",
            )
        if quote < 0:
            position = end
            continue
        position = _end_of_string(body, quote + 1)


def _end_of_string(body: bytes, position: int) -> int:
    """The place behind the quote that ends the string at `position`; the body's end if there is none."""
    while position < len(body):
        part = _STRING_PART.match(body, position, position + _SLICE_BYTES)
        assert part is not None
        end = part.end()
        if end == position or body[end : end + 1] == b'"':
            return end + 1
        position = end
    return position
