"""Text that arrives in pieces, for parsers that are written as if all of it were there.

A parser is a generator. It reads with `yield from reader.…`, and these methods yield while they need more text. What a
parser writes depends on the text only, not on the pieces in which it came.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that yields whenever it needs more text, and then returns a T."""

_SPACE = " \t\r\n"
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class TextReader:
    """The text that no parser has read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self._cut = False
        self._record: list[str] | None = None
        self._write: Callable[[str], None] | None = None
        """Where text goes at once unless it has a character of `_stops`; None: a parser must look at it."""
        self._stops = ""

    def add_text(self, text: str) -> bool:
        """Append a piece; returns whether the parser has to go on. It need not if the piece was only to be copied."""
        if self._write is not None and not self._may_stop(text):
            self._write(text)
            return False
        self._text += text
        return True

    def _may_stop(self, text: str) -> bool:
        # A loop costs a third of what `any` and a generator do, for every token.
        for stop in self._stops:  # noqa: SIM110
            if stop in text:
                return True
        return False

    def end_text(self, *, cut: bool) -> None:
        """Note that no text follows; `cut`: although the writer had not finished, so that a mark may be cut too."""
        self._ended, self._cut = True, cut

    @property
    def is_at_end(self) -> bool:
        """Whether all text has come and has been read."""
        return self._ended and not self._text

    def start_record(self) -> None:
        """Begin to record what is read, so that `take_record` can return it."""
        self._record = []

    def take_record(self) -> str:
        """What was read since `start_record`; ends the recording."""
        record, self._record = self._record or [], None
        return "".join(record)

    def unread(self, text: str) -> None:
        """Put text back, so that it is read next."""
        self._text = text + self._text

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; empty at the end."""
        while not self._text:
            if self._ended:
                return ""
            yield
        return self._text[0]

    def take_all(self) -> str:
        """All text that has come and is unread."""
        return self._take(len(self._text))

    def skip_space(self) -> Steps[None]:
        """Read over whitespace."""
        while True:
            stripped = self._text.lstrip(_SPACE)
            self._take(len(self._text) - len(stripped))
            if self._text or self._ended:
                return
            yield

    def take_literal(self, literal: str) -> Steps[bool]:
        """Read `literal` if the text continues with it; returns whether it does."""
        while len(self._text) < len(literal) and literal.startswith(self._text) and not self._ended:
            yield
        if not self._text.startswith(literal):
            return False
        self._take(len(literal))
        return True

    def take_mark(self, mark: str) -> Steps[bool]:
        """As `take_literal`, but a mark that is cut is dropped."""
        taken = yield from self.take_literal(mark)
        if not taken and self._cut and mark.startswith(self._text):
            self.take_all()
        return taken

    def copy_until(self, markers: tuple[str, ...], write: Callable[[str], None]) -> Steps[str]:
        """Write the text up to the first of `markers` and read the marker.

        A marker must not begin inside another one. Text that may begin a marker is held back, and dropped if it is cut.

        Returns:
            The marker; empty: the text ended before.
        """
        while True:
            found = [(place, marker) for marker in markers if (place := self._text.find(marker)) >= 0]
            if found:
                place, marker = min(found)
                write(self._take(place))
                self._take(len(marker))
                return marker
            complete = self._ended and not self._cut
            held = 0 if complete else max(_overlap(self._text, marker) for marker in markers)
            if len(self._text) > held:
                write(self._take(len(self._text) - held))
            if self._ended:
                self._take(held)
                return ""
            if self._text or self._record is not None:
                yield
            else:
                self._stops, self._write = "".join({marker[0] for marker in markers}), write
                yield
                self._write = None

    def read_string(self) -> Steps[str | None]:
        """Read a JSON string and decode it. None: the text does not continue with a whole string."""
        if not (yield from self.take_literal('"')):
            return None
        raw = ['"']
        escaped = False
        while True:
            char = yield from self.peek()
            if not char:
                return None
            raw.append(self._take(1))
            if char == '"' and not escaped:
                break
            escaped = char == "\\" and not escaped
        try:
            # Models write line breaks inside strings, which JSON forbids.
            value = json.loads("".join(raw), strict=False)
        except ValueError:
            return None
        assert isinstance(value, str)
        return value

    def copy_value(self, write: Callable[[str], None]) -> Steps[bool]:
        """Write one JSON value as it is spelled, up to where no JSON can follow; returns whether it is whole."""
        first = yield from self.peek()
        if first in ("{", "["):
            return (yield from self._copy_nested(write))
        if first == '"':
            value = yield from self.read_string()
            write(json.dumps(value, ensure_ascii=False) if value is not None else "")
            return value is not None
        word = ""
        while (yield from self.peek()) in _SCALAR and not self.is_at_end:
            word += self._take(1)
        write(word)
        return bool(word)

    def _copy_nested(self, write: Callable[[str], None]) -> Steps[bool]:
        """Write an object or an array. Only brackets and strings are looked at."""
        depth, quoted, escaped = 0, False, False
        while True:
            length = len(self._text)
            for place, char in enumerate(self._text):
                if quoted:
                    quoted = escaped or char != '"'
                    escaped = char == "\\" and not escaped
                elif char == '"':
                    quoted = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    if depth == 0:
                        write(self._take(place + 1))
                        return True
                elif char == "<":
                    write(self._take(place))
                    return False
            if length:
                write(self._take(length))
            if self._ended:
                return False
            yield

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        if self._record is not None:
            self._record.append(taken)
        return taken


def _overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that begins `marker`."""
    place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while place >= 0:
        if marker.startswith(text[place:]):
            return len(text) - place
        place = text.find(marker[0], place + 1)
    return 0
