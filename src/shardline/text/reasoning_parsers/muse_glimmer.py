"""Muse Glimmer: messages to itself are reasoning, those to the user content, and all others calls."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.text_reader import Steps

_START, _MESSAGE, _END_OF_TURN = "<|start|>", "<|message|>", "<|eot|>"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Parser(ReasoningParser):
    """`to=self<|message|>…<|eom|>`. The prompt ends before the first header."""

    begin = f"to=self{_MESSAGE}"
    end = "<|eom|>"
    other_begins = (f" {begin}",)
    markers = (_START, _MESSAGE, _END_OF_TURN, end)
    reads_content = True
    template_marks = ("<atem:function_calls>", "<|eom|>")

    @classmethod
    def content_rule(cls, prompt: str, mark: Callable[[str], str]) -> str:
        """The header of the message to the user."""
        return f'(({mark(_START)} "assistant")? / ?to=user/ {mark(_MESSAGE)})? '

    def _parse(self) -> Steps[None]:
        reader = self._reader
        recipient = "self" if self._is_open else ""
        follows_reasoning = False
        while True:
            recipient = recipient or (yield from self._read_header(follows_reasoning))
            follows_reasoning = recipient == "self"
            self._space = ""
            if follows_reasoning:
                self.is_marked = True
                yield from reader.skip_space()
            write = self._write_reasoning if follows_reasoning else self._write_rest
            mark = yield from reader.copy_until((self.end, _END_OF_TURN, _START), write)
            if not mark or not (yield from reader.peek()):
                return
            if mark == _START:
                reader.unread(mark)
            recipient = ""

    def _read_header(self, follows_reasoning: bool) -> Steps[str]:
        """Read a header; returns to whom the message is: the user, if there is no header."""
        reader = self._reader
        reader.start_record()
        yield from reader.skip_space()
        has_start = yield from reader.take_literal(_START)
        if has_start:
            yield from reader.take_literal("assistant")
            yield from reader.skip_space()
        name = ""
        if (yield from reader.take_literal("to=")):
            while (yield from reader.peek()) and (part := reader.take_match(_NAME)):
                name += part
        is_header = yield from reader.take_literal(_MESSAGE)
        text = reader.take_record()
        if not (is_header or has_start):
            self._rest += text.lstrip() if follows_reasoning else text
        recipient = name if is_header and name else "user"
        self.is_over = self.is_over or recipient != "self"
        return recipient

    def _write_rest(self, text: str) -> None:
        self._rest += text
