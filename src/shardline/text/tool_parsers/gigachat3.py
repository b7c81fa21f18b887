"""GigaChat 3: `<|function_call|>{"name": …, "arguments": …}`, or a message of the role "function call"."""

from __future__ import annotations

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers import hermes

_MESSAGE_END = "<|message_sep|>"
_ROLE = "function call<|role_sep|>"


class Parser(hermes.Parser):
    """A call ends with its object, and the message before it with a mark."""

    other_names = ()
    begin = "<|function_call|>"
    end = ""
    space = ("", "")
    template_marks = ("function call", "<|role_sep|>")
    markers = ("<|function_call|>", "<|message_sep|>", "<|role_sep|>")

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while mark := (yield from reader.copy_until((self.begin, _ROLE, _MESSAGE_END), self._write_content)):
            if mark != _MESSAGE_END:
                yield from reader.skip_space()
                yield from self._read_call()
