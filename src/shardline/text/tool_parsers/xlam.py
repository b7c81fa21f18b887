"""xLAM: the answer is `[{"name": …, "arguments": …}, …]`, perhaps in a block of code or behind a mark."""

from __future__ import annotations

import re

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, ToolParser

_MARKS = {"```": "```", "[TOOL_CALLS]": "", "<tool_call>": "</tool_call>"}
"""What may stand before the list, and what behind it then."""


class Parser(ToolParser):
    """A list is one of calls if its first object has the name of an offered function. Other JSON is content."""

    template_marks = ("xlam",)
    markers = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """Content is all that does not begin like the call of an offered function."""
        names = "|".join(re.escape(function.name) for function in rules.functions)
        bodies, first, others = [], [], []
        for index, function in enumerate(rules.functions):
            between, after = rules.text('", "arguments": '), rules.text("}")
            bodies.append(f"body_{index}: {between} {function.arguments()} {after}")
            # With the bracket in one text, since a text of its own would also begin content.
            begin = '{"name": "' + function.name
            first.append(f"{rules.text('[' + begin)} body_{index}")
            others.append(f"{rules.text(begin)} body_{index}")
        more = ' (", " function)*' if rules.parallel else ""
        return f"""
calls: first{more} "]"
auto: calls | CONTENT
CONTENT: /(.|\\n)*/ & ~/[ \\n]*\\[[ \\n]*\\{{"name": "({names})"(.|\\n)*/
first: {" | ".join(first)}
function: {" | ".join(others)}
{chr(10).join(bodies)}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        yield from self._read_calls("")
        while mark := (yield from reader.copy_until(tuple(_MARKS), self._write_content)):
            language = "json" if (yield from reader.take_literal("json")) else ""
            if (yield from self._read_calls(mark + language)) and _MARKS[mark]:
                yield from reader.skip_space()
                yield from reader.take_literal(_MARKS[mark])

    def _read_calls(self, before: str) -> Steps[bool]:
        """Read a list, and return whether it is one of calls. If not, it is content, as `before` is."""
        reader = self._reader
        reader.start_record()
        yield from reader.skip_space()
        is_list = yield from reader.take_literal("[")
        yield from reader.skip_space()
        begin = reader.take_record()
        if not is_list or (yield from reader.peek()) != "{":
            self._write_content(before)
            reader.unread(begin)
            return False
        space, self._space = self._space, self._space + before + begin  # content only if no call follows
        if not (yield from self._read_call(known_names_only=True)):
            return False
        self._space = space
        yield from self._read_list()
        return True
