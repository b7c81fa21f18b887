"""Bounds of the JSON in a body: parsing many small values takes long, and nothing else runs meanwhile."""

from __future__ import annotations

from typing import Any

from shardline.server.errors import bad_request
from shardline.server.openai.large_json import strings_of

MAX_VALUES = 1_000_000
MAX_OBJECTS = 16_384
"""Objects and arrays."""
MAX_MEMBERS = 50_000
"""Members of all objects."""
MAX_STRINGS = 250_000
MAX_BARE_BYTES = 6 << 20
"""Bytes outside strings. Numbers take long if they have many digits."""

MAX_TEMPLATE_VALUES = 65_536
"""Values in one field that chat templates write as JSON."""

_SLICE_BYTES = 1 << 20
"""What is counted at once: other threads run between two slices."""


def check_json_size(body: bytes) -> None:
    """Refuse a body whose JSON has too many values, before it is parsed. Call it on a thread.

    Raises:
        ApiError: 400.
    """
    counter = _Counter()
    counter.count(body, 0, len(body))
    counter.num_strings //= 2  # each has two quotes
    # Texts may contain these characters too, so only if there are many it matters where they stand.
    if counter.is_beyond:
        _check_outside_strings(body)


def check_template_values(name: str, field: Any) -> None:
    """Refuse a field with too many values. Copying them and writing them as JSON holds up all other threads.

    Raises:
        ApiError: 400.
    """
    left = MAX_TEMPLATE_VALUES
    unread = [field]
    while unread:
        entry = unread.pop()
        values = entry.values() if isinstance(entry, dict) else entry
        left -= len(values)
        if left < 0:
            raise bad_request(f"'{name}' has more than {MAX_TEMPLATE_VALUES} values.", name)
        unread += [value for value in values if isinstance(value, dict | list)]


class _Counter:
    """Counts the characters that separate values."""

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

    def count(self, body: bytes, start: int, end: int) -> None:
        """Count those in body[start:end]."""
        for first in range(start, end, _SLICE_BYTES):
            last = min(first + _SLICE_BYTES, end)
            self._num_bytes += last - first
            self._num_values += body.count(b",", first, last)
            self._num_objects += body.count(b"{", first, last) + body.count(b"[", first, last)
            self._num_members += body.count(b":", first, last)
            self.num_strings += body.count(b'"', first, last)


def _check_outside_strings(body: bytes) -> None:
    counter = _Counter()
    position = num_strings = 0
    for start, end in strings_of(body):
        counter.count(body, position, start - 1)
        position = end + 1
        num_strings += 1
        counter.num_strings = num_strings
        if counter.is_beyond:
            break
    counter.count(body, position, len(body))
    counter.num_strings = num_strings
    if counter.is_beyond:
        raise bad_request(
            f"The JSON of the request has more than {MAX_VALUES} values, {MAX_STRINGS} strings, {MAX_OBJECTS} objects "
            f"and arrays, {MAX_MEMBERS} members of objects, or {MAX_BARE_BYTES} bytes outside strings.",
            code="request_too_large",
        )
