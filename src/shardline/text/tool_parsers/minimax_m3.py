"""MiniMax M3: an element for each argument, which may have elements for its parts; each tag follows a mark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardline.text.text_reader import Steps
from shardline.text.tool_parsers import minimax_m2
from shardline.text.tool_parsers.base import CallRules
from shardline.text.tool_parsers.tagged import ArgumentTags, ParameterSchemas, TaggedRules

_MARK = "]<]minimax[>["
_MAX_DEPTH = 32
"""Nesting of elements; what is deeper is text."""


class Parser(minimax_m2.Parser):
    """`]<]minimax[>[<invoke name="…">]<]minimax[>[<key>…]<]minimax[>[</key>]<]minimax[>[</invoke>`, enclosed."""

    begins = (f"{_MARK}<tool_call>",)
    ends = (f"{_MARK}</tool_call>",)
    invoke = f'{_MARK}<invoke name="'
    invoke_end = f"{_MARK}</invoke>"
    parameter = f"{_MARK}<"
    template_marks = (_MARK,)
    markers = (_MARK,)

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """One element with all calls. Lists and objects are written as JSON, which is understood, too."""

        def tags_of(name: str, types: frozenset[str]) -> ArgumentTags:
            return ArgumentTags([_MARK, "<"], [">"], [_MARK, f"</{name}>"])

        functions = TaggedRules(rules, tags_of("", frozenset()), tags_of).write(
            [_MARK, '<invoke name="'], ['">'], [_MARK, "</invoke>"]
        )
        special = _MARK in rules.special_tokens
        # Without a token for the mark, it is one text with its tag: a text of its own would also begin the other tags.
        first, last = (
            f"{rules.mark(_MARK)} {rules.text(tag.removeprefix(_MARK))}" if special else rules.text(tag)
            for tag in (cls.begins[0], cls.ends[0])
        )
        lead = f"lead: TEXT {first}\nTEXT: /(.|\\n)*/" if special else rules.text_before(cls.begins[0])
        return f"""
calls: {first} rest
auto: TEXT | lead rest
rest: {rules.repeated("function", "")} {last}
{lead}
{functions}
"""

    def _read_parameters(self) -> Steps[str]:
        reader = self._reader
        while (yield from reader.copy_until((self.parameter,), lambda text: None)):
            for mark in (self.invoke_end, self.invoke, *self.ends):
                if (yield from reader.take_literal(mark.removeprefix(self.parameter))):
                    return mark
            key: list[str] = []
            if not (yield from reader.copy_until((">",), key.append)):
                return ""
            if not (yield from self._read_text("".join(key), False)):
                return ""
        return ""

    def _read_text(self, key: str, is_text: bool) -> Steps[bool]:
        end = f"{_MARK}</{key}>"
        if self._schemas.types_of(key) == {"string"}:
            return (yield from self._read_value(key, (end,)))
        words: list[str] = []
        if not (yield from self._reader.copy_until((end,), words.append)):
            return False
        schema = self._schemas.schema_of(key)
        value = _to_json("".join(words), schema, 0)
        self._write_arguments(f"{', ' if self._has_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: {value}")
        return True


def _to_json(text: str, schema: Mapping[str, Any], depth: int) -> str:
    """An element as JSON: its text by its schema, or its parts as a list or an object."""
    document = ParameterSchemas({"properties": {"x": schema}, **_definitions(schema)})
    types = document.types_of("x")
    parts = _parts(text) if depth < _MAX_DEPTH else []
    if not parts:
        empty = {"array": "[]", "object": "{}"}
        kind = next((kind for kind in empty if kind in types), "")
        return empty[kind] if kind and "string" not in types and not text.strip() else document.to_json("x", text)
    inner = document.schema_of("x")
    if "array" in types and "object" not in types:
        items = _with_definitions(inner.get("items"), inner)
        return f"[{', '.join(_to_json(part, items, depth + 1) for _, part in parts)}]"
    properties = inner.get("properties")
    fields: dict[str, list[str]] = {}
    for name, part in parts:
        own = properties.get(name) if isinstance(properties, Mapping) else None
        fields.setdefault(name, []).append(_to_json(part, _with_definitions(own, inner), depth + 1))
    values = {name: same[0] if len(same) == 1 else f"[{', '.join(same)}]" for name, same in fields.items()}
    members = [f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values.items()]
    return f"{{{', '.join(members)}}}"


def _parts(text: str) -> list[tuple[str, str]]:
    """The elements of a text, with their names; empty: it has none, or is no sequence of elements."""
    parts: list[tuple[str, str]] = []
    place = 0
    while text[place:].strip():
        start = text.find(f"{_MARK}<", place)
        name, closes, _ = text[start + len(_MARK) + 1 :].partition(">")
        end = _end_of(text, name, start + len(_MARK) + 2 + len(name))
        if start < 0 or text[place:start].strip() or not closes or end < 0:
            return []
        parts.append((name, text[start + len(_MARK) + 2 + len(name) : end]))
        place = end + len(f"{_MARK}</{name}>")
    return parts


def _end_of(text: str, name: str, start: int) -> int:
    """Where the element that is open at `start` is closed; -1: nowhere."""
    opening, closing = f"{_MARK}<{name}>", f"{_MARK}</{name}>"
    depth = 1
    while depth:
        end = text.find(closing, start)
        inner = text.find(opening, start)
        if end < 0:
            return -1
        if 0 <= inner < end:
            depth, start = depth + 1, inner + len(opening)
        else:
            depth, start = depth - 1, end + len(closing)
    return start - len(closing)


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _with_definitions(schema: Any, parent: Mapping[str, Any]) -> dict[str, Any]:
    return {**_definitions(parent), **(schema if isinstance(schema, Mapping) else {})}
