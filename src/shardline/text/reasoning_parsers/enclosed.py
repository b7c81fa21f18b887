"""What formats have in common that also have marks around the content."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.text_reader import Steps


class EnclosedParser(ReasoningParser):
    """The marks around the content, and the space within them, belong to no part. They may be missing."""

    begin = "<think>"
    end = "</think>"
    content_begin: ClassVar[str]
    content_end: ClassVar[str]
    dropped: ClassVar[tuple[str, ...]] = ()
    """Marks that may stand in or behind the content, and belong to no part."""
    reads_content = True

    @classmethod
    def content_rule(cls, prompt: str, mark: Callable[[str], str]) -> str:
        """The first mark of the content; an answer of a required form ends with that form."""
        return f'({cls.spell(cls.content_begin, mark)} "\\n"?)? '

    def _parse(self) -> Steps[None]:
        yield from self._read_reasoning()
        reader = self._reader
        reader.start_record()
        yield from reader.skip_space()
        is_enclosed = yield from reader.take_literal(self.content_begin)
        skipped = reader.take_record()
        if is_enclosed:
            self._space = ""
            yield from reader.skip_space()
            if (yield from reader.copy_until((self.content_end,), self._write_content)):
                yield from reader.skip_space()
            else:
                self._rest += self._space
        else:
            self._rest += skipped
        while self.dropped and (yield from reader.copy_until(self.dropped, self._write_rest)):
            pass
        while (yield from reader.peek()):
            self._rest += reader.take()

    def _write_rest(self, text: str) -> None:
        self._rest += text

    def _write_content(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._rest += shown
