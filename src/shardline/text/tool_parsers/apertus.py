"""Apertus: `<|tools_prefix|>[{"name": {…}}, …]<|tools_suffix|>`, each object with the function's name as its key."""

from __future__ import annotations

from shardline.text.text_reader import Steps, read_string
from shardline.text.tool_parsers.json_lists import ListParser


class Parser(ListParser):
    """One list with all calls."""

    begins = ("<|tools_prefix|>",)
    end = "<|tools_suffix|>"
    call_form = ('{"', '": ', "}")
    template_marks = begins
    markers = ("<|tools_prefix|>", "<|tools_suffix|>")

    def _read_call(self, *, known_names_only: bool = False) -> Steps[bool]:
        reader = self._reader
        reader.start_record()
        yield from reader.take_literal("{")
        yield from reader.skip_space()
        name = yield from read_string(reader)
        yield from reader.skip_space()
        if not name or not (yield from reader.take_literal(":")):
            self._give_up(reader.take_record(), is_markup=True)
            return False
        reader.take_record()
        self._start_call(name)
        yield from reader.skip_space()
        if (yield from self._read_arguments()):
            yield from reader.skip_space()
            if (yield from reader.take_literal("}")):
                self._end_call()
        return True
