"""gpt-oss: messages in the channel `analysis` are reasoning, and those that the user reads lose their marks."""

from __future__ import annotations

from collections.abc import Callable

from shardline.text import harmony
from shardline.text.reasoning_parsers.base import ReasoningParser, ThinkingBudget
from shardline.text.text_reader import Steps, copy_value


class Parser(ReasoningParser):
    """Reasoning may be several messages. Calls of functions go on to the parser of tool calls, with their marks."""

    other_names = ("openai_gptoss",)
    begin = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"
    end = harmony.END
    markers = harmony.MARKERS
    reads_content = True
    template_marks = (harmony.CHANNEL, harmony.CALL)

    def __init__(self, prompt: str, *, call_marks: tuple[str, ...] | None = (), is_free: bool = False) -> None:
        self._prompt_header = harmony.header_of_prompt(prompt)
        self._has_reasoning = self._has_content = False
        super().__init__(prompt, call_marks=call_marks, is_free=is_free)

    @classmethod
    def write_rules(
        cls, prompt: str, mark: Callable[[str], str], budget: ThinkingBudget | None = None
    ) -> tuple[str, str]:
        """Any number of messages that are neither the last one nor a call. A budget has no effect on them."""
        header = harmony.header_of_prompt(prompt)
        if header is not None and header.is_content:
            return "", ""
        start, channel, message = mark(harmony.START), mark(harmony.CHANNEL), mark(harmony.MESSAGE)
        is_special = mark(harmony.END).startswith("<[")
        rules = f"""
note: {channel} ("analysis" | "commentary") {message} body
body{"" if is_special else "[lazy]"}: NOTE {mark(harmony.END)}
NOTE: /(.|\\n)*/
"""
        next_message = f'{start} "assistant"'
        return f"{'' if header is None else f'body {next_message} '}(note {next_message})* ", rules

    @classmethod
    def content_rule(cls, prompt: str, mark: Callable[[str], str]) -> str:
        """The header of the last message."""
        header = harmony.header_of_prompt(prompt)
        if header is not None and header.is_content:
            return ""
        return f'{mark(harmony.CHANNEL)} "final" (" " {mark(harmony.DATA_TYPE)} "json")? {mark(harmony.MESSAGE)} '

    def _parse(self) -> Steps[None]:
        reader = self._reader
        header = self._prompt_header
        mark = ""
        if header is None:
            mark = yield from harmony.read_first_mark(reader)
        while True:
            if mark in (harmony.START, harmony.CHANNEL, harmony.RECIPIENT):
                header = yield from harmony.read_header(reader, mark)
            write = self._write_rest
            if header is not None and header.is_content:
                self.is_over = header.channel == "final"
                self._rest += "\n" if self._has_content else ""
            elif header is not None and header.function:
                self._rest += harmony.write_call_header(header.function) if self._has_tools else ""
                if (yield from reader.peek()) == "{":  # marks in its strings are text
                    yield from copy_value(reader, self._write_rest)
            elif header is not None:
                self.is_marked = True
                self._space = "\n" if self._has_reasoning else ""
                yield from reader.skip_space()
                write = self._write_reasoning
            mark = yield from reader.copy_until(harmony.MARKERS, write)
            if not mark:
                return
            if header is not None and header.function and self._has_tools:
                self._rest += harmony.CALL
            if write == self._write_reasoning and mark == harmony.END:
                yield from reader.skip_space()
            header = None

    def _write_reasoning(self, text: str) -> None:
        super()._write_reasoning(text)
        self._has_reasoning |= bool(text.strip())

    def _write_rest(self, text: str) -> None:
        self._rest += text
        self._has_content |= bool(text)
