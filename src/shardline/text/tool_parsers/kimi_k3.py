"""Kimi K3: channels, `<|open|>call tool="…" index="1"<|sep|>` with `<|open|>argument key="…" type="…"<|sep|>…`."""

from __future__ import annotations

import re

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules
from shardline.text.tool_parsers.tagged import ArgumentTags, TaggedParser, TaggedRules

_OPEN, _CLOSE, _SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
_TOOLS, _TOOLS_END = f"{_OPEN}tools{_SEPARATOR}", f"{_CLOSE}tools{_SEPARATOR}"
_CALL, _CALL_END = f"{_OPEN}call ", f"{_CLOSE}call{_SEPARATOR}"
_ARGUMENT, _ARGUMENT_END = f"{_OPEN}argument ", f"{_CLOSE}argument{_SEPARATOR}"
_AROUND_CONTENT = (f"{_OPEN}response{_SEPARATOR}", f"{_CLOSE}response{_SEPARATOR}", f"{_CLOSE}message{_SEPARATOR}")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class Parser(TaggedParser):
    """Calls stand in a channel of their own, behind that of the content. Each argument says its type."""

    template_marks = (_OPEN, _SEPARATOR, "argument")
    markers = (_OPEN, _CLOSE, _SEPARATOR)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """One channel with all calls."""

        def tags_of(name: str, types: frozenset[str]) -> ArgumentTags:
            kinds = sorted({"number" if kind == "integer" else kind for kind in types})
            kind = "string" if "string" in kinds or not kinds else kinds[0]
            return ArgumentTags(
                [_OPEN, 'argument key="'], [f'" type="{kind}"', _SEPARATOR], [_CLOSE, "argument", _SEPARATOR]
            )

        functions = TaggedRules(rules, tags_of("", frozenset()), tags_of).write(
            [_OPEN, 'call tool="'],
            ['" index="', re.compile("[0-9]{1,3}"), '"', _SEPARATOR],
            [_CLOSE, "call", _SEPARATOR],
        )
        first = f"{rules.mark(_OPEN)} {rules.text('tools')} {rules.mark(_SEPARATOR)}"
        lead = rules.text_before(_TOOLS)
        if _OPEN in rules.special_tokens:
            content, end = rules.mark(_OPEN), rules.mark(_SEPARATOR)
            wrapped = f'({content} "response" {end})? TEXT {rules.mark(_CLOSE)} "response" {end}'
            lead = f"lead: {wrapped} {first}\nTEXT: /(.|\\n)*/"
        return f"""
calls: {first} rest
auto: TEXT | lead rest
rest: {rules.repeated("function", "")} {rules.mark(_CLOSE)} {rules.text("tools")} {rules.mark(_SEPARATOR)}
{lead}
{functions}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        marks = (_TOOLS, *_AROUND_CONTENT)
        while mark := (yield from reader.copy_until(marks, self._write_content)):
            if mark == _TOOLS:
                yield from self._read_channel()

    def _read_channel(self) -> Steps[None]:
        """Read the calls of a channel. Text between them is no content."""
        while (yield from self._reader.copy_until((_CALL, _TOOLS_END), lambda text: None)) == _CALL:
            attributes = yield from self._read_attributes()
            if attributes.get("tool"):
                self._start_tagged_call(attributes["tool"])
                yield from self._read_call_arguments()

    def _read_call_arguments(self) -> Steps[None]:
        reader = self._reader
        ends = (_ARGUMENT, _CALL_END, _CALL, _TOOLS_END)
        while (mark := (yield from reader.copy_until(ends, lambda text: None))) == _ARGUMENT:
            attributes = yield from self._read_attributes()
            if not attributes:
                return
            is_text = attributes.get("type", "string") == "string"
            if not (yield from self._read_value(attributes.get("key", ""), (_ARGUMENT_END,), is_text=is_text)):
                return
        if mark:
            self._end_tagged_call()
        if mark not in ("", _CALL_END):
            reader.unread(mark)

    def _read_attributes(self) -> Steps[dict[str, str]]:
        """The attributes of a tag up to its end; empty: the tag is cut."""
        words: list[str] = []
        if not (yield from self._reader.copy_until((_SEPARATOR,), words.append)):
            return {}
        found = _ATTRIBUTE.findall("".join(words))
        return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}
