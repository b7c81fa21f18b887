"""Bounds of the JSON in a body: parsing many small values takes long, and nothing else runs meanwhile."""

from __future__ import annotations

import asyncio
import re
import time

from shardline.server.errors import bad_request

MAX_VALUES = 1_000_000
MAX_OBJECTS = 50_000
"""Objects and arrays."""
_SMALL_BYTES = 128 * 1024
"""Bodies up to this size are parsed in a few milliseconds, whatever they are."""

_STRING_END = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


async def check_json_size(body: bytes) -> None:
    """Refuse a body whose JSON has too many values, before it is parsed.

    Raises:
        ApiError: 400.
    """
    if len(body) <= _SMALL_BYTES:
        return
    # Texts may contain these characters too, so only if there are many it matters where they stand.
    if body.count(b",") > MAX_VALUES or body.count(b"{") + body.count(b"[") > MAX_OBJECTS:
        await asyncio.to_thread(_count_values, body)


def _count_values(body: bytes) -> None:
    """As `check_json_size`, without what stands in strings."""
    num_values = num_objects = position = 0
    pause = time.perf_counter() + 0.002
    while position < len(body):
        end = body.find(b'"', position)
        end = len(body) if end < 0 else end
        num_values += body.count(b",", position, end)
        num_objects += body.count(b"{", position, end) + body.count(b"[", position, end)
        if num_values > MAX_VALUES or num_objects > MAX_OBJECTS:
            raise bad_request(
                f"The JSON of the request has more than {MAX_VALUES} values, or more than {MAX_OBJECTS} objects and "
                "arrays.",
                code="request_too_large",
            )
        string = _STRING_END.match(body, end + 1)
        if string is None:
            return  # the parser says what is wrong
        position = string.end()
        if time.perf_counter() > pause:
            time.sleep(0)
            pause = time.perf_counter() + 0.002
