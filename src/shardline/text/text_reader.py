"""Text that arrives in pieces, for parsers that are written as if all of it were there.

A parser is a generator. It reads with `yield from reader.…`, and these methods yield while they need more text. What a
parser writes depends on the text only, not on the pieces in which it came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A computation that yields whenever it needs more text, and then returns a T."""
_SPACE = re.compile(r"[ \t\r\n]+")
_ONE = re.compile(".", re.DOTALL)
_IN_STRING = re.compile(r'[^"\\]+|.', re.DOTALL)

_OUTSIDE = re.compile(r'[^"{}\[\]<]+|["{}\[\]]')
"""Between strings. No JSON has "<" there, but it begins the marks of most formats."""
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]+")


class TextReader:
    """The text that no parser has read yet. Reading all of a text takes time in proportion to its length."""

    def __init__(self) -> None:
        self._text = ""
        self._start = 0
        """Where the unread text begins."""
        self._ended = False
        self._cut = False
        self._record: list[str] | None = None
        self._write: Callable[[str], None] | None = None
        """Where text goes at once unless it has a character of `_stops`; None: a parser must look at it."""
        self._stops = ""

    def add_text(self, text: str) -> bool:
        """Append a piece; returns whether the parser has to go on. It need not if the piece was only to be copied."""
        if self._write is not None and not _has_any(text, self._stops):
            self._write(text)
            return False
        self._text, self._start = self._text[self._start :] + text, 0
        return True

    def end_text(self, *, cut: bool) -> None:
        """Note that no text follows; `cut`: although the writer had not finished, so that a mark may be cut too."""
        self._ended, self._cut = True, cut

    @property
    def is_at_end(self) -> bool:
        """Whether all text has come and has been read."""
        return self._ended and self._start == len(self._text)

    @property
    def first(self) -> str:
        """The next character, which stays unread; empty if none has come."""
        return self._text[self._start : self._start + 1]

    def start_record(self) -> None:
        """Begin to record what is read, so that `take_record` can return it."""
        self._record = []

    def take_record(self) -> str:
        """What was read since `start_record`; ends the recording."""
        record, self._record = self._record or [], None
        return "".join(record)

    def unread(self, text: str) -> None:
        """Put text back, so that it is read next. While reading is recorded, this is not possible."""
        assert self._record is None
        if self._text.endswith(text, 0, self._start):
            self._start -= len(text)
        else:
            self._text, self._start = text + self._text[self._start :], 0

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; empty at the end."""
        while self._start == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._start]

    def take(self, count: int | None = None) -> str:
        """The next `count` characters, or as many as have come. None: all that have come."""
        end = len(self._text) if count is None else self._start + count
        taken = self._text[self._start : end]
        self._start += len(taken)
        if self._record is not None:
            self._record.append(taken)
        return taken

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """The text that has come as far as `pattern` matches it; perhaps empty."""
        match = pattern.match(self._text, self._start)
        return self.take(match.end() - self._start) if match is not None else ""

    def skip_space(self) -> Steps[None]:
        """Read over whitespace."""
        while True:
            self.take_match(_SPACE)
            if self._start < len(self._text) or self._ended:
                return
            yield

    def take_literal(self, literal: str) -> Steps[bool]:
        """Read `literal` if the text continues with it; returns whether it does."""
        while not self._ended and _may_become(literal, self._text, self._start):
            yield
        if not self._text.startswith(literal, self._start):
            return False
        self.take(len(literal))
        return True

    def take_mark(self, mark: str) -> Steps[bool]:
        """As `take_literal`, but a mark that is cut is dropped."""
        taken = yield from self.take_literal(mark)
        if not taken and self._cut and _may_become(mark, self._text, self._start):
            self.take()
        return taken

    def copy_until(self, markers: tuple[str, ...], write: Callable[[str], None]) -> Steps[str]:
        """Write the text up to the first of `markers` and read the marker.

        A marker must not begin inside another one. Text that may begin a marker is held back, and dropped if it is cut.

        Returns:
            The marker; empty: the text ended before.
        """
        pattern = _any_of(markers)
        while True:
            match = pattern.search(self._text, self._start)
            if match is not None:
                write(self.take(match.start() - self._start))
                return self.take(len(match[0]))
            complete = self._ended and not self._cut
            held = 0 if complete else max(_overlap(self._text, marker, self._start) for marker in markers)
            if len(self._text) - self._start > held:
                write(self.take(len(self._text) - self._start - held))
            if self._ended:
                self.take()
                return ""
            if held or self._record is not None:
                yield
            else:
                self._stops, self._write = "".join({marker[0] for marker in markers}), write
                yield
                self._write = None


def _may_become(literal: str, text: str, start: int) -> bool:
    """Whether the text from `start` on is a beginning of `literal`, but not the whole."""
    length = len(text) - start
    return length < len(literal) and text.endswith(literal[:length])


def _has_any(text: str, characters: str) -> bool:
    # A loop costs a third of what `any` and a generator do, for every token.
    for character in characters:  # noqa: SIM110
        if character in text:
            return True
    return False


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers))))


def _overlap(text: str, marker: str, start: int) -> int:
    """The length of the longest end of `text` that begins `marker`, at `start` or after it."""
    place = text.find(marker[0], max(start, len(text) - len(marker) + 1))
    while place >= 0:
        if marker.startswith(text[place:]):
            return len(text) - place
        place = text.find(marker[0], place + 1)
    return 0


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
