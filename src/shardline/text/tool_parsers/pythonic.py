"""Llama 3.2 and others: the whole answer is `[name(key=value, …), …]`."""

from __future__ import annotations

from typing import ClassVar

from shardline.text.tool_parsers.literals import LiteralParser


class Parser(LiteralParser):
    """Values are Python's literals."""

    template_marks: ClassVar[tuple[str, ...]] = ("[func_name1(params_name1=params_value1",)
    markers: ClassVar[tuple[str, ...]] = ()
