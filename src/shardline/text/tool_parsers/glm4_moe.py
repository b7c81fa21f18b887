"""GLM-4.5 and later: `<tool_call>name`, then `<arg_key>…</arg_key>` and `<arg_value>…</arg_value>` in turn."""

from __future__ import annotations

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules
from shardline.text.tool_parsers.tagged import NAME, ArgumentTags, TaggedParser, TaggedRules

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class Parser(TaggedParser):
    """An element for each call. GLM-4.5 writes a line break between its parts, GLM-4.7 writes none."""

    other_names = ("glm45", "glm47", "ling3", "poolside_v1")
    template_marks = (_BEGIN, _KEY, _VALUE)
    markers = (_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """In the form that the chat template shows."""
        line = "" if _KEY_END + _VALUE in rules.template else "\n"
        tags = ArgumentTags([_KEY], [_KEY_END, line, _VALUE], [_VALUE_END, line])
        return f"""
calls: {rules.repeated("call", line)}
call: {rules.mark(_BEGIN)} rest
auto: {"(lead rest)* TEXT" if rules.parallel else "TEXT | lead rest"}
rest: function {rules.mark(_END)}
{rules.text_before(_BEGIN)}
{TaggedRules(rules, tags).write([], [line], [])}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while mark := (yield from reader.copy_until((_BEGIN, _END), self._write_content)):
            while mark == _BEGIN:
                mark = yield from self._read_tagged_call()

    def _read_tagged_call(self) -> Steps[str]:
        """Read a call after its first mark; returns the mark that ended it."""
        reader = self._reader
        yield from reader.skip_space()
        words: list[str] = []
        mark = yield from reader.copy_until(("\n", _KEY, _END, _BEGIN), words.append)
        name = "".join(words).strip()
        if not mark or not NAME.fullmatch(name):
            self._give_up("".join(words), is_markup=True)
            reader.unread(mark)
            return ""
        self._start_tagged_call(name)
        if mark == "\n":
            mark = yield from reader.copy_until((_KEY, _END, _BEGIN), lambda text: None)
        while mark == _KEY:
            key: list[str] = []
            if not (yield from reader.copy_until((_KEY_END,), key.append)):
                return ""
            if not (yield from reader.copy_until((_VALUE,), lambda text: None)):
                return ""
            if not (yield from self._read_value("".join(key).strip(), (_VALUE_END,))):
                return ""
            mark = yield from reader.copy_until((_KEY, _END, _BEGIN), lambda text: None)
        if mark:
            self._end_tagged_call()
        return mark
