"""Structural tags: free text in which a tag begins a part of a required form, as vLLM and xgrammar describe them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from shardline.sampling_params import StructuredOutputsParams
from shardline.structured.grammar import encode_grammar, json_schema, lark_text, structured_grammar

T = TypeVar("T")

_MAX_REPEATS = 1000


class _Tag(msgspec.Struct, frozen=True):
    """A text that begins a part, what the part has, and the texts that may end it."""

    begin: str
    content: dict[str, Any]
    end: str | list[str]
    type: str = "tag"


class _Structure(msgspec.Struct, frozen=True):
    """The older form of a tag, whose content is always JSON."""

    begin: str
    end: str
    schema: dict[str, Any] | bool | str | None = None


class _Structures(msgspec.Struct, frozen=True):
    structures: list[_Structure]
    triggers: list[str]


class _TriggeredTags(msgspec.Struct, frozen=True):
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class _SeparatedTags(msgspec.Struct, frozen=True):
    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class _Repeat(msgspec.Struct, frozen=True):
    content: dict[str, Any]
    min: int = 0
    max: int = -1


_UNLIMITED = ("any_text", "triggered_tags")
"""Formats whose text goes on until something ends it."""


def structural_tag_grammar(given: str | Mapping[str, Any], params: StructuredOutputsParams) -> str:
    """The grammar of a structural tag, as an object or as JSON; `params` has the options of JSON within it.

    Both forms are taken: `structures` and `triggers`, and xgrammar's tree in `format`.

    Raises:
        ValueError: it is malformed, or has a format that is not supported.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structural_tag is not JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise ValueError("structural_tag must be an object with 'structures' and 'triggers', or with a 'format'")
    writer = _Writer(params)
    if "format" in given:
        start = writer.write(given["format"], "format", [])
    else:
        start = writer.write_structures(_convert(given, _Structures, "structural_tag"))
    return writer.finish(start)


class _Writer:
    """Writes formats as Lark. A format's expression has what ends it, too."""

    def __init__(self, params: StructuredOutputsParams) -> None:
        self._params = params
        self._rules: list[str] = []
        self._parts: list[dict[str, Any]] = []

    def finish(self, start: str) -> str:
        """The whole grammar."""
        lark = "\n".join([f"start: {start}", *self._rules])
        return encode_grammar([{"name": "structural_tag", "lark_grammar": lark}, *self._parts])

    def write(self, format: Any, place: str, ends: Sequence[str]) -> str:
        """A format and one of the texts `ends` after it, in Lark. They may be empty, and there may be none.

        `place`: where it stands in the request.
        """
        kind = format.get("type") if isinstance(format, Mapping) else None
        if kind == "any_text":
            return self._text(_texts(format, "excludes", place), ends)
        if kind == "triggered_tags":
            return self._triggered(_convert(format, _TriggeredTags, place), place, ends)
        if kind == "sequence":
            return self._sequence(_formats(format, place), f"{place}.elements", ends)
        if kind == "or":
            choices = _formats(format, place)
            return _any_of([self.write(part, f"{place}.elements[{i}]", ends) for i, part in enumerate(choices)])
        return f"{self._limited(kind, format, place)}{_ending(ends)}"

    def write_structures(self, given: _Structures) -> str:
        """The older form."""
        tags = []
        for structure in given.structures:
            schema = {} if structure.schema is None else structure.schema
            tags.append(_Tag(structure.begin, {"type": "json_schema", "json_schema": schema}, structure.end))
        return self._triggered(_TriggeredTags(given.triggers, tags), "structures", [])

    def _limited(self, kind: Any, format: Any, place: str) -> str:
        """A format that ends by itself."""
        if kind == "const_string":
            return lark_text(_required(format, "value", str, place))
        if kind == "json_schema":
            if format.get("style", "json") != "json":
                raise ValueError(f"'{place}.style' is {format['style']!r}; supported is 'json'")
            return self._json(_required(format, "json_schema", (Mapping, str, bool), place))
        if kind == "regex":
            return self._part(StructuredOutputsParams(regex=_required(format, "pattern", str, place)))
        if kind == "grammar":
            return self._part(StructuredOutputsParams(grammar=_required(format, "grammar", str, place)))
        if kind == "tag":
            return self._tag(_convert(format, _Tag, place), place)
        if kind == "tags_with_separator":
            return self._separated(_convert(format, _SeparatedTags, place), place)
        if kind in ("optional", "plus", "star", "repeat"):
            repeat = _convert(format, _Repeat, place)
            if repeat.content.get("type") in _UNLIMITED:
                raise ValueError(f"'{place}.content' has no end, so it cannot be repeated")
            inner = self.write(repeat.content, f"{place}.content", [])
            return f"({inner}){_times(kind, repeat, place)}"
        raise ValueError(
            f"'{place}' has the type {kind!r}; supported are any_text, const_string, grammar, json_schema, optional, "
            "or, plus, regex, repeat, sequence, star, tag, tags_with_separator and triggered_tags"
        )

    def _json(self, schema: Any) -> str:
        if isinstance(schema, str):
            schema = json.loads(schema)
        return "%json " + json.dumps(json_schema(schema, self._params), ensure_ascii=False)

    def _part(self, params: StructuredOutputsParams) -> str:
        """A grammar of its own."""
        name = f"part_{len(self._parts)}"
        [part] = json.loads(structured_grammar(params))["grammars"]
        self._parts.append({**part, "name": name})
        return f"@{name}"

    def _tag(self, tag: _Tag, place: str, begun: str = "") -> str:
        """A tag, of whose beginning `begun` has been written."""
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        content = self.write(tag.content, f"{place}.content", ends)
        begin = tag.begin[len(begun) :]
        return self._rule(f"{lark_text(begin)} {content}" if begin else content)

    def _triggered(self, given: _TriggeredTags, place: str, ends: Sequence[str]) -> str:
        """Text with tags, each of which a trigger begins."""
        if not (given.tags and given.triggers and all(given.triggers)):
            raise ValueError(f"'{place}' must have tags, and triggers that are not empty")
        by_trigger: dict[str, list[str]] = {}
        whole = []
        for index, tag in enumerate(given.tags):
            triggers = [trigger for trigger in given.triggers if tag.begin.startswith(trigger)]
            if len(triggers) != 1:
                raise ValueError(f"'{place}': the tag {tag.begin!r} must begin with exactly one of the triggers")
            where = f"{place}.tags[{index}]"
            by_trigger.setdefault(triggers[0], []).append(self._tag(tag, where, triggers[0]))
            if given.at_least_one:
                whole.append(self._tag(tag, where))
        text = self._terminal(given.excludes)
        tagged = _any_of(
            [
                f"{self._rule(f'{text} {lark_text(trigger)}', lazy=True)} {_any_of(tags)}"
                for trigger, tags in by_trigger.items()
            ]
        )
        after = self._text(given.excludes, ends)
        if given.stop_after_first:
            return f"{_any_of(whole)}{_ending(ends)}" if whole else f"({tagged}{_ending(ends)} | {after})"
        return f"{_any_of(whole) + ' ' if whole else ''}({tagged})* {after}"

    def _separated(self, given: _SeparatedTags, place: str) -> str:
        if not given.tags:
            raise ValueError(f"'{place}' must have tags")
        tag = _any_of([self._tag(tag, f"{place}.tags[{i}]") for i, tag in enumerate(given.tags)])
        more = "" if given.stop_after_first else f" ({lark_text(given.separator)} {tag})*"
        return f"({tag}{more}){'' if given.at_least_one else '?'}"

    def _sequence(self, elements: Sequence[Any], place: str, ends: Sequence[str]) -> str:
        for index, element in enumerate(elements[:-1]):
            if isinstance(element, Mapping) and element.get("type") in _UNLIMITED:
                raise ValueError(f"'{place}[{index}]' has no end: only the last element of a sequence may be such text")
        last = len(elements) - 1
        return " ".join(self.write(e, f"{place}[{i}]", ends if i == last else []) for i, e in enumerate(elements))

    def _text(self, excludes: Sequence[str], ends: Sequence[str]) -> str:
        """Any text without `excludes`, up to the first of `ends`."""
        text = self._terminal(excludes)
        rules = [self._rule(f"{text} {lark_text(end)}", lazy=True) if end else self._rule(text) for end in ends]
        return _any_of(rules or [self._rule(text)])

    def _terminal(self, excludes: Sequence[str]) -> str:
        name = f"TEXT_{len(self._rules)}"
        banned = "".join(f" & ~({name}_ANY {lark_text(text)} {name}_ANY)" for text in excludes)
        self._rules.append(f"{name}: /(.|\\n)*/{banned}")
        if banned:
            self._rules.append(f"{name}_ANY: /(.|\\n)*/")
        return name

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name


def _any_of(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"


def _ending(ends: Sequence[str]) -> str:
    texts = [lark_text(end) for end in ends if end]
    return f" {_any_of(texts)}{'' if all(ends) else '?'}" if texts else ""


def _times(kind: str, repeat: _Repeat, place: str) -> str:
    if kind != "repeat":
        return {"optional": "?", "plus": "+", "star": "*"}[kind]
    if not (0 <= repeat.min <= _MAX_REPEATS and (repeat.max == -1 or repeat.min <= repeat.max <= _MAX_REPEATS)):
        raise ValueError(f"'{place}': min and max must be a range within 0 to {_MAX_REPEATS}; max may be -1")
    return f"{{{repeat.min},{'' if repeat.max == -1 else repeat.max}}}"


def _convert(given: Any, type: type[T], place: str) -> T:
    try:
        return msgspec.convert(given, type)
    except msgspec.ValidationError as error:
        raise ValueError(f"'{place}' is malformed: {error}") from error


def _required(format: Mapping[str, Any], name: str, types: Any, place: str) -> Any:
    if not isinstance(format.get(name), types):
        raise ValueError(f"'{place}.{name}' is missing, or has a wrong type")
    return format[name]


def _formats(format: Mapping[str, Any], place: str) -> Sequence[Any]:
    elements: Sequence[Any] = _required(format, "elements", list, place)
    if not elements:
        raise ValueError(f"'{place}.elements' is empty")
    return elements


def _texts(format: Mapping[str, Any], name: str, place: str) -> list[str]:
    return _convert(format.get(name) or [], list[str], f"{place}.{name}")
