"""Inkling: the blocks of a message are reasoning, content or calls."""

from __future__ import annotations

from collections.abc import Callable

from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.text_reader import Steps

_HEADER, _TEXT, _CALL = "<|message_model|>", "<|content_text|>", "<|content_invoke_tool_json|>"
_SHOWN = (_TEXT, "<|content_invoke_tool_text|>", "<|content_tool_error|>")
"""Marks of blocks that the client reads."""
_END_OF_TURN = "<|content_model_end_sampling|>"


class Parser(ReasoningParser):
    """`<|message_model|><|content_thinking|>…<|end_message|>`. Calls go on to their parser, with their marks."""

    begin = "<|content_thinking|>"
    end = "<|end_message|>"
    other_begins = (_HEADER + begin,)
    markers = (_HEADER, begin, end, _CALL, _END_OF_TURN, *_SHOWN)
    reads_content = True
    template_marks = (begin, _CALL)

    @classmethod
    def content_rule(cls, prompt: str, mark: Callable[[str], str]) -> str:
        """The header of a block of text."""
        return f"({mark(_HEADER)})? ({mark(_TEXT)})? "

    def _parse(self) -> Steps[None]:
        reader = self._reader
        block = self.begin if self._is_open else ""
        while True:
            write = self._write_rest
            if block == self.begin:
                self.is_marked = True
                yield from reader.skip_space()
                write = self._write_reasoning
            elif block == _HEADER:  # the name of a function may follow, which the call has, too
                write = _drop
            elif block == _CALL and self._has_tools:
                self._rest += _CALL
            mark = yield from reader.copy_until(self.markers, write)
            if not mark:
                return
            if block == self.begin:
                self._space = ""
                yield from reader.skip_space()
            elif block == _CALL and self._has_tools:
                self._rest += self.end
            self.is_over = self.is_over or mark in (*_SHOWN, _CALL)
            block = "" if mark in (self.end, _END_OF_TURN) else mark

    def _write_rest(self, text: str) -> None:
        self._rest += text


def _drop(text: str) -> None:
    """Take no notice of a text."""
