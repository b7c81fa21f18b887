"""Reads JSON out of a text that arrives in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from shardline.text.text_reader import Steps, TextReader

_ONE = re.compile(".", re.DOTALL)
_IN_STRING = re.compile(r'[^"\\]+|.', re.DOTALL)
_OUTSIDE = re.compile(r'[^"{}\[\]<]+|["{}\[\]]')
"""Between strings. No JSON has "<" there, but it begins the marks of most formats."""
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]+")


def read_string(reader: TextReader) -> Steps[str | None]:
    """Read a JSON string and decode it. None: the text does not continue with a whole string."""
    if not (yield from reader.take_literal('"')):
        return None
    raw = ['"']
    escaped = False
    while (yield from reader.peek()):
        part = reader.take_match(_ONE if escaped else _IN_STRING)
        raw.append(part)
        if part == '"' and not escaped:
            return _decoded("".join(raw))
        escaped = part == "\\" and not escaped
    return None


def copy_value(reader: TextReader, write: Callable[[str], None]) -> Steps[bool]:
    """Write one JSON value as it is spelled, up to where no JSON can follow; returns whether it is whole."""
    first = yield from reader.peek()
    if first in ("{", "["):
        return (yield from _copy_nested(reader, write))
    if first == '"':
        value = yield from read_string(reader)
        write(json.dumps(value, ensure_ascii=False) if value is not None else "")
        return value is not None
    word = ""
    while (yield from reader.peek()) and (part := reader.take_match(_SCALAR)):
        word += part
    write(word)
    return bool(word)


def _copy_nested(reader: TextReader, write: Callable[[str], None]) -> Steps[bool]:
    """Write an object or an array. Only brackets and strings are looked at."""
    depth, quoted, escaped = 0, False, False
    while True:
        parts: list[str] = []
        while part := reader.take_match(_ONE if escaped else _IN_STRING if quoted else _OUTSIDE):
            parts.append(part)
            if quoted:
                quoted = escaped or part != '"'
                escaped = part == "\\" and not escaped
            elif part == '"':
                quoted = True
            elif part in ("{", "["):
                depth += 1
            elif part in ("}", "]"):
                depth -= 1
                if depth == 0:
                    break
        if parts:
            write("".join(parts))
        if depth == 0:
            return True
        if reader.first or reader.is_at_end:
            return False
        yield


def _decoded(raw: str) -> str | None:
    try:
        # Models write line breaks inside strings, which JSON forbids.
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    assert isinstance(value, str)
    return value
