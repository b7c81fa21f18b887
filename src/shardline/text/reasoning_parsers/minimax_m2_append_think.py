"""MiniMax M2, for clients that read its reasoning themselves: it stays in the content, and has its first mark."""

from __future__ import annotations

from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.text_reader import Steps


class Parser(ReasoningParser):
    """`<think>…</think>` in the content. The first mark is part of the prompt."""

    begin = "<think>"
    end = "</think>"
    reads_content = True

    def _parse(self) -> Steps[None]:
        self._rest += self.begin
        while (yield from self._reader.peek()):
            self._rest += self._reader.take()
