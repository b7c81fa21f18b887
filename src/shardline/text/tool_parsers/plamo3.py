"""PLaMo 3: calls between marks, with marks around each name and its arguments."""

from __future__ import annotations

from shardline.text import harmony
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser


def _mark(words: str) -> str:
    return f"<|plamo:{words}:plamo|>"


_FIRST, _LAST = _mark("begin_tool_requests"), _mark("end_tool_requests")
_CALL, _CALL_END = _mark("begin_tool_request"), _mark("end_tool_request")
_NAME, _NAME_END = _mark("begin_tool_name"), _mark("end_tool_name")
_ARGUMENTS, _ARGUMENTS_END = _mark("begin_tool_arguments"), _mark("end_tool_arguments")
_TYPE, _BODY = harmony.DATA_TYPE.replace("<|", "<|plamo:"), "<|plamo:msg|>"
_JSON = f"{_TYPE}json{_BODY}"
_TURN_END = "<|plamo:tag|>"


class Parser(ToolParser):
    """Calls follow one another in one section after the content. Tokenizers spell the marks in several tokens."""

    template_marks = (_FIRST,)
    markers = (
        "<|plamo:begin_", "<|plamo:end_", ":plamo|>", _TYPE, _BODY, _TURN_END,
        _FIRST, _LAST, _CALL, _CALL_END, _NAME, _NAME_END, _ARGUMENTS, _ARGUMENTS_END,
    )  # fmt: skip

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The first mark."""
        return (_FIRST,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """In the form that the chat template shows."""
        first, call = cls._spell(rules, _FIRST), cls._spell(rules, _CALL + _NAME)
        between = cls._spell(rules, _NAME_END + _ARGUMENTS + _JSON)
        after = cls._spell(rules, _ARGUMENTS_END + _CALL_END)
        begins = "<|plamo:begin_" in rules.special_tokens
        lead = f"lead: TEXT {first}\nTEXT: /(.|\\n)*/" if begins else rules.text_before(_FIRST)
        return f"""
calls: {first} rest
auto: TEXT | lead rest
rest: {rules.repeated("call", "")} {cls._spell(rules, _LAST)}
call: {call} function
{lead}
{rules.function_rules("", between, after)}
"""

    @classmethod
    def _spell(cls, rules: CallRules, text: str) -> str:
        """A text with marks, in Lark: the parts of marks that are special tokens are these."""
        spelled = []
        while text:
            part = next((mark for mark in cls.markers if mark in rules.special_tokens and text.startswith(mark)), "")
            if not part:
                places = [text.find(mark) for mark in cls.markers if mark in rules.special_tokens]
                end = min((place for place in places if place > 0), default=len(text))
                part = text[:end]
                spelled.append(rules.text(part))
            else:
                spelled.append(rules.mark(part))
            text = text[len(part) :]
        return " ".join(spelled)

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while mark := (yield from reader.copy_until((_FIRST, _LAST, _TURN_END), self._write_content)):
            while mark in (_FIRST, _NAME):
                if mark == _NAME:
                    yield from self._read_named_call()
                mark = yield from reader.copy_until((_NAME, _LAST), lambda text: None)

    def _read_named_call(self) -> Steps[None]:
        reader = self._reader
        name: list[str] = []
        if not (yield from reader.copy_until((_NAME_END,), name.append)):
            return
        self._start_call("".join(name).strip())
        mark = yield from reader.copy_until((_ARGUMENTS, _CALL_END, _LAST), lambda text: None)
        if mark != _ARGUMENTS:
            reader.unread(mark)
            if mark:
                self._end_call()
            return
        yield from reader.take_mark(_JSON)
        yield from reader.skip_space()
        if (yield from self._read_arguments()):
            self._end_call()
