"""MiniMax M2: calls as `<invoke name="…">` with `<parameter name="…">…</parameter>`, in one element."""

from __future__ import annotations

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules
from shardline.text.tool_parsers.tagged import NAME, ArgumentTags, TaggedParser, TaggedRules

_BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = '<invoke name="', "</invoke>"
_PARAMETER, _PARAMETER_END = '<parameter name="', "</parameter>"
_NAME_END = '">'


class Parser(TaggedParser):
    """Calls follow one another in one element after the content."""

    template_marks = (_BEGIN,)
    markers = (_BEGIN, _END)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """One element with all calls."""
        tags = ArgumentTags([_PARAMETER], [_NAME_END], [_PARAMETER_END, "\n"])
        functions = TaggedRules(rules, tags).write([_INVOKE], [_NAME_END, "\n"], [_INVOKE_END, "\n"])
        return f"""
calls: {rules.mark(_BEGIN)} rest
auto: TEXT | lead rest
rest: "\\n" {rules.repeated("function", "")} {rules.mark(_END)}
{rules.text_before(_BEGIN)}
{functions}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while mark := (yield from reader.copy_until((_BEGIN, _END), self._write_content)):
            if mark == _BEGIN:
                yield from self._read_calls()

    def _read_calls(self) -> Steps[None]:
        """Read the calls of an element. Text between them is no content."""
        reader = self._reader
        yield from reader.skip_space()
        num_calls = self.num_calls
        held: list[str] = []
        while True:
            mark = yield from reader.copy_until((_INVOKE, _END, _BEGIN), held.append)
            if mark == _INVOKE:
                if not (yield from self._read_invoke(held)):
                    return
            elif mark != _BEGIN:
                break
        if self.num_calls == num_calls:
            self._give_up("".join(held), is_markup=True)

    def _read_invoke(self, held: list[str]) -> Steps[bool]:
        """Read a call; returns whether more may follow. What is no call is added to `held`."""
        reader = self._reader
        words: list[str] = []
        mark = yield from reader.copy_until((_NAME_END, "\n", _END), words.append)
        if mark != _NAME_END or not NAME.fullmatch("".join(words)):
            held += words
            if mark == _END:
                reader.unread(mark)
            return bool(mark)
        self._start_tagged_call("".join(words))
        ends = (_PARAMETER, _INVOKE_END, _INVOKE, _END)
        while (mark := (yield from reader.copy_until(ends, lambda text: None))) == _PARAMETER:
            key: list[str] = []
            if not (yield from reader.copy_until((_NAME_END,), key.append)):
                return False
            if not (yield from self._read_value("".join(key), (_PARAMETER_END,))):
                return False
        if not mark:
            return False
        self._end_tagged_call()
        if mark != _INVOKE_END:
            reader.unread(mark)
        return True
