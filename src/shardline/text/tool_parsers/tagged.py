"""What formats have in common that write each argument as text between tags, and not as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from shardline.structured.grammar import lark_json, lark_text
from shardline.text.text_reader import Steps
from shardline.text.tool_parsers.base import CallRules, OfferedFunction, ToolParser

_MAX_DEPTH = 20
"""Nesting of alternatives and references that is followed to find a parameter's types."""
ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A function's name."""


class ParameterSchemas:
    """The parameters of one function. What is malformed in a schema says nothing."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        """`parameters`: the function's JSON schema; None: it has no parameters."""
        self._root = parameters or {}
        schema = self._follow(self._root)
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        self.required = frozenset(str(name) for name in required) if isinstance(required, list | tuple) else frozenset()
        """The names of the parameters that a call must have."""
        self.takes_any = (
            parameters is not None and not self._properties and schema.get("additionalProperties") is not False
        )
        """Whether the schema names no parameters, so that a call may have any."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the schema."""
        return tuple(self._properties)

    def schema_of(self, name: str) -> dict[str, Any]:
        """A parameter's schema, with the definitions that it may refer to."""
        schema = self._properties.get(name)
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {**definitions, **self._follow(schema)} if isinstance(schema, Mapping) else definitions

    def types_of(self, name: str) -> frozenset[str]:
        """The JSON types that a parameter may have."""
        return self._types(self._properties.get(name), _MAX_DEPTH)

    def to_json(self, name: str, text: str) -> str:
        """A parameter's text as JSON. What is no JSON of its types becomes a string."""
        types = self.types_of(name)
        word = text.strip()
        value = _parse_json(word)
        json_type = type_of(value)
        if json_type in types and json_type != "string":
            return word
        if "string" in types:
            return as_json(text)
        # Some models spell these words as Python does.
        for spelled, kind in (("true", "boolean"), ("false", "boolean"), ("null", "null")):
            if kind in types and word.lower() == spelled:
                return spelled
        if word == "None" and "null" in types:
            return "null"
        return word if json_type else as_json(text)

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return ALL_TYPES
        schema = self._follow(schema)
        types = ALL_TYPES
        stated = schema.get("type")
        if isinstance(stated, str):
            types = frozenset({stated})
        elif isinstance(stated, list | tuple):
            types = frozenset(str(name) for name in stated)
        if isinstance(schema.get("enum"), list | tuple):
            types &= frozenset(type_of(value) for value in schema["enum"])
        if "const" in schema:
            types &= {type_of(schema["const"])}
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list | tuple) and schema[key]:
                types &= frozenset().union(*(self._types(part, depth - 1) for part in schema[key]))
        if isinstance(schema.get("allOf"), list | tuple):
            for part in schema["allOf"]:
                types &= self._types(part, depth - 1)
        return types | {"integer"} if "number" in types else types

    def _follow(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema that a chain of references within this document leads to."""
        for _ in range(_MAX_DEPTH):
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            target: Any = self._root
            for part in reference[2:].split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                target = target.get(part) if isinstance(target, Mapping) else None
            if not isinstance(target, Mapping):
                return {}
            schema = target
        return schema


def type_of(value: Any) -> str:
    """The JSON type of a value; empty: it has none."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {str: "string", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
    return names.get(type(value), "")


def _parse_json(text: str) -> Any:
    """The value of a JSON text; `NoReturn`, which has no JSON type: it is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return NoReturn


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


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

    def _read_value(self, key: str, ends: tuple[str, ...], *, is_text: bool = False) -> Steps[bool]:
        """Read the argument `key` up to one of `ends`; returns whether it is whole. `is_text`: the format says so."""
        self._write_arguments(f"{', ' if self._has_arguments else '{'}{as_json(key)}: ")
        if is_text or self._schemas.types_of(key) == {"string"}:
            self._write_arguments('"')
            end = yield from self._reader.copy_until(ends, lambda text: self._write_arguments(as_json(text)[1:-1]))
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
    after_key: Sequence[str | re.Pattern[str]]
    """Up to the value."""
    after_value: Sequence[str]
    """The first part ends the value, and does not belong to it."""


class TaggedRules:
    """Rules in Lark for the names and arguments of the offered functions."""

    def __init__(
        self,
        rules: CallRules,
        tags: ArgumentTags,
        tags_of: Callable[[str, frozenset[str]], ArgumentTags] | None = None,
    ) -> None:
        """`tags_of`: those of an argument with a name and types, where they differ; what ends a value must not."""
        self._rules = rules
        self._tags = tags
        self._tags_of = tags_of or (lambda name, types: tags)
        self._lines: list[str] = []

    def write(self, before: Sequence[str], between: Sequence[str | re.Pattern[str]], after: Sequence[str]) -> str:
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
            tags = self._tags_of(name, schemas.types_of(name))
            key = self._join([*tags.before_key, name, *tags.after_key])
            value = self._value(schemas, name, rule)
            self._lines.append(f"{rule}: {key} {value} {self._join(tags.after_value[1:])}")
            uses.append(rule if name in schemas.required else f"{rule}?")
        return uses

    def _value(self, schemas: ParameterSchemas, name: str, rule: str) -> str:
        """A value and what ends it, in Lark."""
        schema = schemas.schema_of(name)
        types = schemas.types_of(name)
        end = self._rules.mark(self._tags.after_value[0])
        if isinstance(schema.get("enum"), list | tuple) and schema["enum"]:
            texts = [value if isinstance(value, str) else as_json(value) for value in schema["enum"]]
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

    def _join(self, parts: Sequence[str | re.Pattern[str]]) -> str:
        """Texts, marks and patterns, one after another, in Lark."""
        joined: list[str] = []
        text = ""
        for part in parts:
            if isinstance(part, re.Pattern) or part in self._rules.special_tokens:
                joined += [lark_text(text)] if text else []
                joined.append(self._rules.mark(part) if isinstance(part, str) else f"/{part.pattern}/")
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


def as_json(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False)
