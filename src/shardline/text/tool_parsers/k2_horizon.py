"""K2 Horizon: GLM-4.5's format with marks of its own, or with a JSON object for each call."""

from __future__ import annotations

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers import glm4_moe


class Parser(glm4_moe.Parser):
    """`<ifm|tool_call>name<ifm|arg_key>…</ifm|arg_key><ifm|arg_value>…</ifm|arg_value></ifm|tool_call>`, enclosed.

    A mark for the type of a value, which may stand before it, is read over.
    """

    other_names = ()
    begin = "<ifm|tool_call>"
    end = "</ifm|tool_call>"
    outer = ("<ifm|tool_calls>", "</ifm|tool_calls>")
    key = ("<ifm|arg_key>", "</ifm|arg_key>")
    value = ("<ifm|arg_value>", "</ifm|arg_value>")
    template_marks = ("<ifm|tool_calls>",)
    markers = (begin, end, *outer, *key, *value, "<ifm|arg_type>", "</ifm|arg_type>")

    def _read_tagged_call(self) -> Steps[str]:
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) != "{":
            return (yield from super()._read_tagged_call())
        yield from self._read_call()
        return (yield from self._reader.copy_until((self.begin, self.end), lambda text: None))
