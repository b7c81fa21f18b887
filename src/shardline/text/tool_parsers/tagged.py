"""What formats have in common that write each argument as text between tags, and not as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardline.structured.grammar import lark_json, lark_text
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import ToolParser
from shardline.text.tool_parsers.call_rules import CallRules, OfferedFunction
from shardline.text.tool_parsers.parameter_schemas import ParameterSchemas

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A function's name."""


class TaggedParser(ToolParser):
    """Turns arguments that are text into JSON, by the parameters' schemas.

    A text whose parameter can only be a string is sent as it comes. Any other value is sent once it is whole, since
    only then it is known to be JSON.
    """

    _schemas = ParameterSchemas(None)
    """The parameters of the call that is read."""

    def _start_tagged_call(self, name: str) -> None:
        self._start_call(name)
        function = self._functions.get(name)
        # A function that was not offered may have any parameters.
        self._schemas = ParameterSchemas({} if function is None else function.parameters)

    def _end_tagged_call(self) -> None:
        if self._has_arguments:
            self._write_arguments("}")
        self._end_call()

    def _read_value(self, key: str, ends: tuple[str, ...]) -> Steps[bool]:
        """Read the argument `key` up to one of `ends`; returns whether it is whole."""
        self._write_arguments(f"{', ' if self._has_arguments else '{'}{_quote(key)}: ")
        if self._schemas.types_of(key) == {"string"}:
            self._write_arguments('"')
            end = yield from self._reader.copy_until(ends, lambda text: self._write_arguments(_quote(text)[1:-1]))
            if end:
                self._write_arguments('"')
            return bool(end)
        words: list[str] = []
        if not (yield from self._reader.copy_until(ends, words.append)):
            return False
        self._write_arguments(self._schemas.to_json(key, "".join(words)))
        return True


@dataclass(frozen=True)
class ArgumentTags:
    """How a format spells arguments. All are parts of text, in which marks of the format may occur."""

    before_key: Sequence[str]
    after_key: Sequence[str]
    """Up to the value."""
    after_value: Sequence[str]
    """The first part ends the value, and does not belong to it."""


class TaggedRules:
    """Rules in Lark for the names and arguments of the offered functions."""

    def __init__(self, rules: CallRules, tags: ArgumentTags) -> None:
        self._rules = rules
        self._tags = tags
        self._lines: list[str] = []

    def write(self, before: Sequence[str], between: Sequence[str], after: Sequence[str]) -> str:
        """The rule `function`: a name between two texts, then its arguments and a third text; and its parts.

        Raises:
            ValueError: a parameter's schema is no schema.
        """
        self._lines = []
        functions = self._rules.functions
        names = " | ".join(f"function_{index}" for index in range(len(functions)))
        lines = [f"function: {names}"]
        for index, function in enumerate(functions):
            arguments = " ".join(self._write_parameters(index, function))
            name = self._join([*before, function.name, *between])
            lines.append(f"function_{index}: {name} {arguments} {self._join(after)}")
        return "\n".join([*lines, *self._lines, self._text_rule])

    @cached_property
    def _text_rule(self) -> str:
        """The rule `text`: any text, and what ends it."""
        return self._rules.text_before(self._tags.after_value[0], "text", "ANY_TEXT")

    def _write_parameters(self, index: int, function: OfferedFunction) -> list[str]:
        schemas = ParameterSchemas(function.parameters)
        if schemas.takes_any:
            key = f"{self._join(self._tags.before_key)} ANY_KEY {self._join(self._tags.after_key)}"
            self._lines.append(f"any_{index}: {key} text {self._join(self._tags.after_value[1:])}")
            if not any(line.startswith("ANY_KEY") for line in self._lines):
                self._lines.append('ANY_KEY: /[^<>"\\n]{1,64}/')
            return [f"any_{index}*"]
        uses = []
        for place, name in enumerate(schemas.names):
            rule = f"parameter_{index}_{place}"
            key = self._join([*self._tags.before_key, name, *self._tags.after_key])
            value = self._value(schemas, name, rule)
            self._lines.append(f"{rule}: {key} {value} {self._join(self._tags.after_value[1:])}")
            uses.append(rule if name in schemas.required else f"{rule}?")
        return uses

    def _value(self, schemas: ParameterSchemas, name: str, rule: str) -> str:
        """A value and what ends it, in Lark."""
        schema = schemas.schema_of(name)
        types = schemas.types_of(name)
        end = self._rules.mark(self._tags.after_value[0])
        if isinstance(schema.get("enum"), list | tuple) and schema["enum"]:
            texts = [value if isinstance(value, str) else _quote(value) for value in schema["enum"]]
            return f"({' | '.join(lark_text(text) for text in texts)}) {end}"
        if "string" not in types:
            return f"{lark_json(schema)} {end}"
        limits = _string_limits(schema) if types == {"string"} else []
        if not limits:
            return "text"
        terminal = rule.upper()
        closes = self._tags.after_value[0]
        if closes in self._rules.special_tokens:
            self._lines.append(f"{terminal}: {' & '.join(limits)}")
            return f"{terminal} {end}"
        free = f"~/(.|\\n)*{_escape(closes)}(.|\\n)*/"
        self._lines.append(f"{terminal}: ({' & '.join([*limits, free])}) {end}")
        return terminal

    def _join(self, parts: Sequence[str]) -> str:
        """Texts and marks, one after another, in Lark."""
        joined: list[str] = []
        text = ""
        for part in parts:
            if part in self._rules.special_tokens:
                joined += [lark_text(text)] if text else []
                joined.append(self._rules.mark(part))
                text = ""
            else:
                text += part
        return " ".join([*joined, lark_text(text)] if text or not joined else joined)


def _string_limits(schema: dict[str, object]) -> list[str]:
    """What a schema demands of a string, as regular expressions in Lark."""
    limits = []
    shortest, longest = schema.get("minLength"), schema.get("maxLength")
    if isinstance(shortest, int) or isinstance(longest, int):
        bounds = f"{shortest if isinstance(shortest, int) else 0},{longest if isinstance(longest, int) else ''}"
        limits.append(f"/(.|\\n){{{bounds}}}/")
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        starts, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[starts : len(pattern) - ends].replace("/", "\\/")
        anywhere = "(.|\\n)*"
        limits.append(f"/{'' if starts else anywhere}({inner}){'' if ends else anywhere}/")
    return limits


def _escape(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _quote(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
