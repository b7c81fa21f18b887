"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,count:3}<tool_call|>`, one after another."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, OfferedFunction, ToolParser
from shardline.text.tool_parsers.literals import copy_items, copy_word, ordered_arguments, read_word
from shardline.text.tool_parsers.tagged import ParameterSchemas, as_json

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_BARE = re.compile(r"[^,:\[\]{}<]+")
"""A key, or a value that is no text."""
_MAX_DEPTH = 8
"""Nesting of schemas that the rules follow; what is deeper may be anything."""


class Parser(ToolParser):
    """Texts stand between marks, and keys between none. Values become JSON as they come."""

    other_names: ClassVar[tuple[str, ...]] = ()
    begin: ClassVar[str] = "<|tool_call>"
    end: ClassVar[str] = "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'
    """Before and behind a text."""
    template_marks: ClassVar[tuple[str, ...]] = (begin, quote)
    markers: ClassVar[tuple[str, ...]] = (begin, end, quote)

    @classmethod
    def call_marks(cls) -> tuple[str, ...]:
        """The first mark."""
        return (cls.begin,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """One mark for each call, and the arguments in the order of the schema."""
        return f"""
calls: {rules.repeated("call", "")}
call: {rules.mark(cls.begin)} rest
auto: {"(lead rest)* TEXT" if rules.parallel else "TEXT | lead rest"}
rest: function {rules.mark(cls.end)}
{rules.text_before(cls.begin)}
{_ValueRules(rules, cls.quote).write()}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        while mark := (yield from reader.copy_until((self.begin, self.end), self._write_content)):
            if mark == self.begin:
                yield from self._read_marked_call()

    def _read_marked_call(self) -> Steps[None]:
        reader = self._reader
        reader.start_record()
        yield from reader.skip_space()
        yield from reader.take_literal("call:")
        name = yield from read_word(reader, _NAME, _NAME)
        if not name or (yield from reader.peek()) != "{":
            self._give_up(reader.take_record(), is_markup=True)
            return
        reader.take_record()
        self._start_call(name)
        if (yield from self._copy_object(self._write_arguments)):
            self._end_call()

    def _copy_object(self, write: Callable[[str], None]) -> Steps[bool]:
        """Write an object as JSON; returns whether it is whole."""
        return copy_items(self._reader, write, self._copy_entry, "}")

    def _copy_entry(self, write: Callable[[str], None]) -> Steps[bool]:
        reader = self._reader
        key: list[str] = []
        if not (yield from reader.take_mark(self.quote)):
            key.append((yield from read_word(reader, _BARE, _BARE)).strip())
        elif not (yield from reader.copy_until((self.quote,), key.append)):
            return False
        yield from reader.skip_space()
        if not (yield from reader.take_literal(":")):
            return False
        write(f"{as_json(''.join(key))}: ")
        return (yield from self._copy_value(write))

    def _copy_value(self, write: Callable[[str], None]) -> Steps[bool]:
        reader = self._reader
        yield from reader.skip_space()
        if (yield from reader.take_mark(self.quote)):
            write('"')
            end = yield from reader.copy_until((self.quote,), lambda text: write(as_json(text)[1:-1]))
            write('"' if end else "")
            return bool(end)
        first = yield from reader.peek()
        if first in ("{", "["):
            copied = self._copy_object(write) if first == "{" else copy_items(reader, write, self._copy_value, "]")
            return (yield from copied)
        return (yield from copy_word(reader, write, _BARE))


class _ValueRules:
    """The rules of the offered functions and of their values."""

    def __init__(self, rules: CallRules, quote: str) -> None:
        self._rules = rules
        self._quote = quote
        self._lines: list[str] = []

    def write(self) -> str:
        """The rule `function`, and its parts.

        Raises:
            ValueError: a parameter's schema is no schema.
        """
        quote = self._rules.mark(self._quote)
        lazy = "" if self._quote in self._rules.special_tokens else "[lazy]"
        names = " | ".join(f"function_{index}" for index in range(len(self._rules.functions)))
        self._lines = [
            f"function: {names}",
            f"text: {quote} quoted",
            f"quoted{lazy}: QUOTED {quote}",
            "QUOTED: /(.|\\n)*/",
            "KEY: /[A-Za-z_][A-Za-z0-9_]*/",
            f"scalar: {self._rules.json({'type': ['number', 'boolean', 'null']})}",
            'any: text | scalar | "[" (any ("," any)*)? "]" | fields',
            'fields: "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
        ]
        for index, function in enumerate(self._rules.functions):
            fields = self._fields(function, f"value_{index}", 0)
            self._lines.append(f"function_{index}: {self._rules.text('call:' + function.name)} {fields}")
        return "\n".join(self._lines)

    def _fields(self, function: OfferedFunction, rule: str, depth: int) -> str:
        """An object with brackets, in Lark."""
        schemas = ParameterSchemas(function.parameters)
        if schemas.takes_any or depth == _MAX_DEPTH:
            return "fields"
        uses = []
        for index, name in enumerate(schemas.names):
            own = f"{rule}_{index}"
            value = self._value(schemas.schema_of(name), schemas.types_of(name), own, depth)
            self._lines.append(f"{own}: {self._rules.text(name + ':')} {value}")
            uses.append((own, name in schemas.required))
        arguments = ordered_arguments(uses, '","')
        return f'"{{" {arguments} "}}"'

    def _value(self, schema: Mapping[str, Any], types: frozenset[str], rule: str, depth: int) -> str:
        if isinstance(schema.get("enum"), list | tuple) and schema["enum"]:
            quote = self._rules.mark(self._quote)
            spelled = [
                f"{quote} {self._rules.text(value)} {quote}"
                if isinstance(value, str)
                else self._rules.text(as_json(value))
                for value in schema["enum"]
            ]
            return f"({' | '.join(spelled)})"
        choices = ["text"] if "string" in types else []
        scalars = sorted(types & {"integer", "number", "boolean", "null"})
        if scalars:
            limits = {key: schema[key] for key in ("minimum", "maximum") if key in schema}
            choices.append(f"{self._rules.json({'type': scalars, **limits})}")
        if "array" in types:
            items = {"properties": {"x": schema.get("items", {})}, **_definitions(schema)}
            inner = ParameterSchemas(items)
            item = "any"
            if isinstance(schema.get("items"), Mapping) and depth < _MAX_DEPTH:
                item = f"{rule}_item"
                value = self._value(inner.schema_of("x"), inner.types_of("x"), item, depth + 1)
                self._lines.append(f"{item}: {value}")
            choices.append(f'"[" ({item} ("," {item})*)? "]"')
        if "object" in types:
            choices.append(self._fields(OfferedFunction("", schema), f"{rule}_field", depth + 1))
        return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}
