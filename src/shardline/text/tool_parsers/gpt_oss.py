"""gpt-oss: messages to `functions.name` whose body is the arguments."""

from __future__ import annotations

from shardline.text import harmony
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser


class Parser(ToolParser):
    """Reads whole answers, and also what the parser of reasoning leaves: calls with their marks, and plain text."""

    other_names = ("openai",)
    template_marks = (harmony.CHANNEL, harmony.CALL)
    markers = harmony.MARKERS

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """A message for each call; notes before it belong to the reasoning."""
        start, channel, message = (rules.mark(mark) for mark in (harmony.START, harmony.CHANNEL, harmony.MESSAGE))
        constrain, call = rules.mark(harmony.DATA_TYPE), rules.mark(harmony.CALL)
        again = f'({call} {start} "assistant" call)*' if rules.parallel else ""
        return f"""
calls: call {again} {call}?
auto: calls | {channel} "final" {message} TEXT
call: {channel} "commentary to=functions." function
TEXT: /(.|\\n)*/
{rules.function_rules("", f'" " {constrain} "json" {message}', "")}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        mark = yield from harmony.read_first_mark(reader)
        while mark or (mark := (yield from reader.copy_until(harmony.MARKERS, self._write_content))):
            header = None
            if mark in (harmony.START, harmony.CHANNEL, harmony.RECIPIENT):
                header = yield from harmony.read_header(reader, mark)
            mark = ""
            if header is not None and header.function:
                yield from self._read_body(header.function)

    def _read_body(self, function: str) -> Steps[None]:
        """Read the arguments of a call and the rest of its message."""
        self._start_call(function)
        yield from self._reader.skip_space()
        whole = (yield from self._reader.peek()) in '{"' and (yield from self._read_arguments())
        mark = yield from self._reader.copy_until(harmony.MARKERS, lambda text: None)
        if mark not in (harmony.END, harmony.CALL, harmony.RETURN):
            self._reader.unread(mark)
        if whole or mark:
            self._end_call()
