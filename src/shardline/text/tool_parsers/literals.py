"""What formats have in common that write calls as Python does: `name(key=value, …)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from shardline.text.text_reader import Steps, TextReader
from shardline.text.tool_parsers.base import CallRules, OfferedFunction, ToolParser
from shardline.text.tool_parsers.tagged import ParameterSchemas, as_json

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_KEY = re.compile(r"\w+")
_WORD = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
"""The number of hexadecimal digits behind an escape."""
_REPLACEMENT = "\ufffd"


class LiteralParser(ToolParser):
    """Calls stand between marks, or are the whole answer. Each value becomes JSON as it comes."""

    begin: ClassVar[str] = ""
    """The mark before the calls; empty: they are the whole answer, if it begins with an offered function. Then
    `markers` may stand around them."""
    end: ClassVar[str] = ""
    brackets: ClassVar[tuple[str, str]] = ("[", "]")
    """What encloses all calls."""
    separator: ClassVar[str] = ", "
    """What stands between calls."""

    @classmethod
    def write_rules(cls, rules: CallRules) -> str:
        """Calls with named arguments, in the order of the schema."""
        opening, closing = cls.brackets
        more = f" ({rules.text(cls.separator)} function)*" if rules.parallel else ""
        calls = f"first{more} {rules.text(closing) if closing else ''}"
        functions = _FunctionRules(rules).write(opening)
        if cls.begin:
            return f"""
calls: {rules.mark(cls.begin)} rest
auto: TEXT | lead rest
rest: {calls} {rules.mark(cls.end)}
{rules.text_before(cls.begin)}
{functions}
"""
        names = "|".join(re.escape(function.name) for function in rules.functions)
        around = [f"{rules.mark(mark)}?" if mark in rules.special_tokens else "" for mark in cls.markers] or ["", ""]
        return f"""
calls: {around[0]} {calls} {around[1]}
auto: calls | CONTENT
CONTENT: /(.|\\n)*/ & ~/[ \\n]*\\[({names})\\((.|\\n)*/
{functions}
"""

    def _parse(self) -> Steps[None]:
        reader = self._reader
        if self.begin:
            marks = (self.begin, self.end)
            while mark := (yield from reader.copy_until(marks, self._write_content)):
                if mark == self.begin:
                    yield from self._read_calls()
            return
        space = ""
        while (char := (yield from reader.peek())).isspace():
            yield from reader.take_literal(char)
            space += char
        self._write_content(space)
        if self.markers and (yield from reader.take_mark(self.markers[0])):
            yield from reader.skip_space()
            char = yield from reader.peek()
        if char == "[":
            yield from self._read_calls()
        if self.markers:
            while (yield from reader.copy_until(self.markers, self._write_content)):
                pass
        while (yield from reader.peek()):
            self._write_content(reader.take())

    def _read_calls(self) -> Steps[None]:
        reader = self._reader
        reader.start_record()
        yield from reader.skip_space()
        yield from reader.take_literal("[")
        while True:
            yield from reader.skip_space()
            name = yield from read_word(reader, _NAME)
            # Behind a call, others may be of functions that nobody offered.
            is_call = bool(name) and (bool(self.begin) or name in self._functions or self.num_calls > 0)
            if not (is_call and (yield from reader.take_literal("("))):
                self._give_up(reader.take_record(), is_markup=bool(self.begin))
                return
            reader.take_record()
            self._start_call(name)
            if not (yield from self._read_named_arguments()):
                return
            self._end_call()
            yield from reader.skip_space()
            yield from reader.take_literal(",")
            yield from reader.skip_space()
            if (yield from reader.take_literal("]")) or (yield from reader.peek()) in ("", "<"):
                return
            reader.start_record()

    def _read_named_arguments(self) -> Steps[bool]:
        """Read arguments up to the closing bracket; returns whether they are whole."""
        reader = self._reader
        while True:
            yield from reader.skip_space()
            if (yield from reader.take_literal(")")):
                if self._has_arguments:
                    self._write_arguments("}")
                return True
            yield from reader.take_literal(",")
            yield from reader.skip_space()
            key = yield from read_word(reader, _KEY)
            yield from reader.skip_space()
            if not (key and (yield from reader.take_literal("="))):
                if key or (yield from reader.peek()) != ")":
                    return False
                continue
            self._write_arguments(f"{', ' if self._has_arguments else '{'}{as_json(key)}: ")
            if not (yield from copy_literal(reader, self._write_arguments)):
                return False


def read_word(reader: TextReader, first: re.Pattern[str], more: re.Pattern[str] = _WORD) -> Steps[str]:
    """Read as far as `first` and then `more` match, wherever the text is cut; empty: it does not continue so."""
    word = ""
    while (yield from reader.peek()):
        part = reader.take_match(more if word else first)
        if not part:
            break
        word += part
    return word


def copy_literal(reader: TextReader, write: Callable[[str], None]) -> Steps[bool]:
    """Write one Python literal as JSON; returns whether it is whole. Words that are no literal become strings."""
    yield from reader.skip_space()
    first = yield from reader.peek()
    if first in ("'", '"'):
        write('"')
        whole = yield from _copy_string(reader, lambda text: write(as_json(text)[1:-1]))
        write('"' if whole else "")
        return whole
    if first in ("[", "("):
        end = "]" if first == "[" else ")"
        return (yield from copy_items(reader, write, partial(copy_literal, reader), end))
    if first == "{":
        return (yield from copy_items(reader, write, partial(_copy_entry, reader), "}"))
    return (yield from copy_word(reader, write, _WORD))


def copy_word(reader: TextReader, write: Callable[[str], None], pattern: re.Pattern[str]) -> Steps[bool]:
    """Write a number, a constant, or another word as a string; returns whether it is whole."""
    word = (yield from read_word(reader, pattern, pattern)).strip()
    if not word or reader.is_at_end:
        return False
    write(_CONSTANTS.get(word) or (word if _NUMBER.fullmatch(word) else as_json(word)))
    return True


def copy_items(
    reader: TextReader,
    write: Callable[[str], None],
    copy_item: Callable[[Callable[[str], None]], Steps[bool]],
    end: str,
) -> Steps[bool]:
    """Write an object up to its bracket "}" as JSON, or a list up to its bracket `end`; returns whether it is whole."""
    between = ""

    def write_item(text: str) -> None:
        nonlocal between
        write(between + text)
        between = ""

    reader.take(1)
    write("{" if end == "}" else "[")
    while True:
        yield from reader.skip_space()
        if (yield from reader.take_literal(end)):
            write("}" if end == "}" else "]")
            return True
        if not (yield from copy_item(write_item)):
            return False
        yield from reader.skip_space()
        yield from reader.take_literal(",")
        between = ", "


def _copy_entry(reader: TextReader, write: Callable[[str], None]) -> Steps[bool]:
    key: list[str] = []
    if not (yield from copy_literal(reader, key.append)):
        return False
    text = "".join(key)
    yield from reader.skip_space()
    if not (yield from reader.take_literal(":")):
        return False
    write(f"{text if text.startswith(chr(34)) else as_json(text)}: ")
    return (yield from copy_literal(reader, write))


def _copy_string(reader: TextReader, write: Callable[[str], None]) -> Steps[bool]:
    """Write the text of a string; returns whether it is whole."""
    quote = reader.take(1)
    high = 0
    """The first half of a pair of surrogates."""
    while char := (yield from reader.peek()):
        code = -1
        text = ""
        if char == "\\":
            reader.take(1)
            kind = yield from reader.peek()
            reader.take(1)
            if kind in _CODES:
                digits = ""
                while len(digits) < _CODES[kind] and (yield from reader.peek()):
                    digits += reader.take(1)
                code = int(digits, 16) if re.fullmatch(r"[0-9a-fA-F]+", digits) else ord(_REPLACEMENT)
            elif kind:
                text = _ESCAPES.get(kind, kind if kind in ("\\", "'", '"') else "\\" + kind)
            if reader.is_at_end:
                return False
        elif char != quote:
            text = reader.take_match(_PLAIN[quote])
        if high and 0xDC00 <= code < 0xE000:
            text, code, high = chr(0x10000 + (high - 0xD800) * 0x400 + code - 0xDC00), -1, 0
        elif high:
            write(_REPLACEMENT)
            high = 0
        if 0xD800 <= code < 0xDC00:
            high = code
        elif code >= 0:
            text = chr(code) if code < 0x110000 and not 0xDC00 <= code < 0xE000 else _REPLACEMENT
        if text:
            write(text)
        if char == quote:
            reader.take(1)
            return True
    return False


class _FunctionRules:
    """The rules of the offered functions."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._lines: list[str] = []

    def write(self, opening: str) -> str:
        """The rules `function`, and `first` for one with the text `opening` before it, and their parts.

        Raises:
            ValueError: a parameter's schema is no schema.
        """
        first, others = [], []
        for index, function in enumerate(self._rules.functions):
            self._lines.append(f'arguments_{index}: {self._arguments(function, f"value_{index}")} ")"')
            # With the bracket in one text, since a text of its own would also begin content.
            first.append(f"{self._rules.text(f'{opening}{function.name}(')} arguments_{index}")
            others.append(f"{self._rules.text(f'{function.name}(')} arguments_{index}")
        return "\n".join([f"first: {' | '.join(first)}", f"function: {' | '.join(others)}", *self._lines])

    def _arguments(self, function: OfferedFunction, rule: str) -> str:
        schemas = ParameterSchemas(function.parameters)
        if schemas.takes_any:
            self._lines.append(f"{rule}_any: /[A-Za-z_][A-Za-z0-9_]*/ {self._rules.text('=')} {self._rules.json({})}")
            return f'({rule}_any (", " {rule}_any)*)?'
        uses = []
        for index, name in enumerate(schemas.names):
            types = schemas.types_of(name)
            value = '("True" | "False")' if types == {"boolean"} else self._rules.json(schemas.schema_of(name))
            self._lines.append(f"{rule}_{index}: {self._rules.text(name + '=')} {value}")
            uses.append((f"{rule}_{index}", name in schemas.required))
        return ordered_arguments(uses, '", "')


def ordered_arguments(uses: Sequence[tuple[str, bool]], comma: str) -> str:
    """Arguments in their order, in Lark; `uses`: each one's rule, and whether it must be."""
    if not uses:
        return ""
    # Each choice begins with one of the arguments; all that follow it have the comma before them.
    rest = ""
    choices: list[str] = []
    for use, required in reversed(uses):
        if required:
            choices = []
        choices.insert(0, f"{use} {rest}")
        rest = f"({comma} {use}){'' if required else '?'} {rest}"
    choices = choices if any(required for _, required in uses) else [*choices, '""']
    return f"({' | '.join(choices)})"
