"""Hostile JSON schemas."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.hostile import draws, regexes

Schema = Any


def chain(length: int) -> Schema:
    """Definitions of which each one refers to the next one."""
    links = {
        f"d{index}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{index + 1}"}}, "required": ["a"]}
        for index in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def properties(count: int, *, required: bool = False) -> Schema:
    """An object of many properties."""
    names = [f"property_{index}" for index in range(count)]
    schema: Schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return {**schema, "required": names} if required else schema


def letters(count: int, keyword: str = "allOf") -> Schema:
    """A text that has each of so many letters: the product of as many automata."""
    parts = [{"type": "string", "pattern": f".*{chr(97 + index % 26)}.*"} for index in range(count)]
    return {keyword: parts}


def overlapping_patterns(count: int) -> Schema:
    """An object whose properties match many patterns at once."""
    patterns = {f"^.*{index}.*$": {"type": "integer", "minimum": index} for index in range(count)}
    return {"type": "object", "patternProperties": patterns, "additionalProperties": False}


def doubling(levels: int, keyword: str = "prefixItems") -> Schema:
    """Definitions of which each one has the next one twice."""
    levels_of = {
        f"d{index}": {"type": "array", keyword: [{"$ref": f"#/$defs/d{index + 1}"}] * 2, "minItems": 2}
        for index in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**levels_of, f"d{levels}": {"type": "null"}}}


def deep(depth: int, keyword: str = "items") -> Schema:
    """Schemas in each other."""
    inner: Schema = {"type": "string"}
    for _ in range(depth):
        match keyword:
            case "items":
                inner = {"type": "array", "items": inner, "minItems": 1}
            case "properties":
                inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
            case _:
                inner = {keyword: [inner]}
    return inner


def cycle(length: int) -> Schema:
    """References in a circle that never reach a type."""
    links = {f"d{index}": {"$ref": f"#/$defs/d{(index + 1) % length}"} for index in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links}


NAMED: dict[str, Callable[[], Schema]] = {
    "1,000 references in a chain": lambda: chain(1000),
    "multipleOf 999983": lambda: {"type": "integer", "multipleOf": 999_983},
    "3,000 properties": lambda: properties(3000),
    "3,000 required properties": lambda: properties(2000, required=True),
    "19 letters": lambda: letters(19),
    "23 letters": lambda: letters(23),
    "300 overlapping patternProperties": lambda: overlapping_patterns(300),
    "reference to itself": lambda: {"$ref": "#"},
    "cycle of 3": lambda: cycle(3),
}
"""The literal examples of the attack that this corpus grew from."""

_DEFINITIONS = 4


class _Grammar:
    """Draws schemas from the grammar of JSON Schema, with a preference for what multiplies."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def schema(self, depth: int) -> Schema:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.15:
            return self.leaf()
        makers = (self.string, self.number, self.array, self.object, self.object, self.combined, self.combined)
        schema = rng.choice(makers)(depth - 1)
        if rng.random() < 0.1:
            schema = {**schema, **rng.choice(makers)(depth - 1)}  # keywords of several types beside each other
        if rng.random() < 0.05:
            schema[rng.choice(list(schema) or ["type"])] = draws.value(rng)
        return schema

    def leaf(self) -> Schema:
        rng = self.rng
        return rng.choice(
            (
                lambda: rng.choice((True, False, {}, {"type": "null"}, {"type": "boolean"}, {"type": []})),
                lambda: {"type": rng.choice(("string", "integer", "number", "array", "object", "any", None, 7))},
                lambda: {"type": rng.sample(("string", "integer", "number", "array", "object", "null"), 3)},
                lambda: {"const": draws.value(rng)},
                lambda: {"enum": [draws.value(rng, 1) for _ in range(draws.size(rng, 400))]},
                self.reference,
            )
        )()

    def reference(self) -> Schema:
        rng = self.rng
        target = f"#/$defs/d{rng.randrange(_DEFINITIONS + 1)}"  # the last one is missing
        odd = (
            "#",
            "",
            "#/",
            "#/$defs",
            "#/properties/a",
            "#/$defs/%64%30",
            "#a",
            "d0",
            "https://example.org/s",
            "#/~2",
        )
        key = rng.choice(("$ref",) * 8 + ("$dynamicRef", "$recursiveRef"))
        return {key: target if rng.random() < 0.7 else rng.choice(odd)}

    def string(self, _depth: int) -> Schema:
        rng = self.rng
        schema: Schema = {"type": "string"}
        if rng.random() < 0.7:
            schema["pattern"] = regexes.regex(rng)
        if rng.random() < 0.3:
            schema["format"] = rng.choice(("date-time", "email", "uuid", "ipv6", "uri", "hostname", "regex", "x"))
        if rng.random() < 0.4:
            schema["minLength"] = rng.choice((draws.size(rng, 10**6), draws.number(rng)))
        if rng.random() < 0.4:
            schema["maxLength"] = rng.choice((draws.size(rng, 10**6), draws.number(rng)))
        return schema

    def number(self, _depth: int) -> Schema:
        rng = self.rng
        schema: Schema = {"type": rng.choice(("integer", "number"))}
        if rng.random() < 0.7:
            schema["multipleOf"] = rng.choice((*draws.PRIMES, draws.number(rng), 0.01, 1e-9, 0.3))
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if rng.random() < 0.3:
                schema[keyword] = draws.number(rng)
        return schema

    def array(self, depth: int) -> Schema:
        rng = self.rng
        schema: Schema = {"type": "array", "items": self.schema(depth)}
        if rng.random() < 0.3:
            schema["prefixItems"] = [self.schema(depth - 1) for _ in range(draws.size(rng, 6))]
        for keyword in ("minItems", "maxItems"):
            if rng.random() < 0.4:
                schema[keyword] = rng.choice((draws.size(rng, 10**5), draws.number(rng)))
        if rng.random() < 0.1:
            schema[rng.choice(("uniqueItems", "contains", "unevaluatedItems"))] = self.schema(1)
        return schema

    def object(self, depth: int) -> Schema:
        rng = self.rng
        names = [rng.choice((f"p{index}", draws.text(rng, 3))) for index in range(draws.size(rng, 10))]
        schema: Schema = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        if rng.random() < 0.5:
            schema["required"] = [*names[: rng.randrange(len(names) + 1)], *(["absent"] if rng.random() < 0.1 else [])]
        if rng.random() < 0.4:
            count = draws.size(rng, 12)
            schema["patternProperties"] = {regexes.regex(rng, 1): self.schema(depth - 1) for _ in range(count)}
        if rng.random() < 0.5:
            schema["additionalProperties"] = rng.choice((False, True, self.schema(depth - 1)))
        if rng.random() < 0.1:
            keyword = rng.choice(
                ("propertyNames", "minProperties", "maxProperties", "dependentSchemas", "dependencies")
            )
            schema[keyword] = rng.choice((self.schema(1), draws.number(rng)))
        return schema

    def combined(self, depth: int) -> Schema:
        rng = self.rng
        keyword = rng.choice(("allOf", "allOf", "anyOf", "oneOf", "not", "if"))
        if keyword == "not":
            return {"not": self.schema(depth)}
        if keyword == "if":
            return {"if": self.schema(depth), "then": self.schema(depth), "else": self.schema(depth)}
        return {keyword: [self.schema(depth) for _ in range(draws.size(rng, 8))]}


def _drawn(rng: random.Random) -> Schema:
    grammar = _Grammar(rng)
    schema = grammar.schema(rng.randrange(1, 5))
    if not isinstance(schema, dict):
        return schema
    return {**schema, "$defs": {f"d{index}": grammar.schema(2) for index in range(_DEFINITIONS)}}


_SHAPES: tuple[Callable[[random.Random], Schema], ...] = (
    lambda rng: chain(draws.size(rng, 1000)),
    lambda rng: properties(draws.size(rng, 3000), required=rng.random() < 0.5),
    lambda rng: letters(draws.size(rng, 26), rng.choice(("allOf", "anyOf", "oneOf"))),
    lambda rng: overlapping_patterns(draws.size(rng, 300)),
    lambda rng: doubling(draws.size(rng, 40), rng.choice(("prefixItems", "items", "anyOf", "allOf"))),
    lambda rng: deep(draws.size(rng, 400), rng.choice(("items", "properties", "anyOf", "allOf", "oneOf"))),
    lambda rng: cycle(draws.size(rng, 100)),
    lambda rng: {"type": "integer", "multipleOf": rng.choice(draws.PRIMES)},
    lambda rng: {"allOf": [{"type": "integer", "multipleOf": prime} for prime in rng.sample(draws.PRIMES, 3)]},
    lambda rng: {"enum": [f"{index:x}" * rng.randrange(1, 4) for index in range(draws.size(rng, 9000))]},
    lambda rng: {"type": "string", "minLength": draws.size(rng, 10**6), "pattern": regexes.regex(rng)},
    lambda rng: {"type": "array", "items": _drawn(rng), "minItems": draws.size(rng, 10**5)},
    lambda rng: {"anyOf": [properties(draws.size(rng, 30)) for _ in range(draws.size(rng, 60))]},
    lambda rng: {"allOf": [{"anyOf": [{"required": [f"p{i}"]},
    {"required": [f"q{i}"]}]} for i in range(draws.size(rng, 24))]},
)  # fmt: skip


def schema(rng: random.Random) -> Schema:
    """A schema: half of them are drawn from the grammar, and half have a shape that is known to hurt."""
    return _drawn(rng) if rng.random() < 0.5 else rng.choice(_SHAPES)(rng)
