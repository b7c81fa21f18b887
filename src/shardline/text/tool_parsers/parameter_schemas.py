"""The parameters of a function by their JSON schemas, for formats that write arguments as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

_MAX_DEPTH = 20
"""Nesting of alternatives and references that is followed to find a parameter's types."""

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


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
        found = type_of(value)
        if found in types and found != "string":
            return word
        if "string" in types:
            return json.dumps(text, ensure_ascii=False)
        # Some models spell these words as Python does.
        for spelled, kind in (("true", "boolean"), ("false", "boolean"), ("null", "null")):
            if kind in types and word.lower() == spelled:
                return spelled
        if word == "None" and "null" in types:
            return "null"
        return word if found else json.dumps(text, ensure_ascii=False)

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return ALL_TYPES
        schema = self._follow(schema)
        types = ALL_TYPES
        stated = schema.get("type")
        if isinstance(stated, str):
            types = frozenset({stated})
        elif isinstance(stated, list | tuple):
            types = frozenset(str(one) for one in stated)
        if isinstance(schema.get("enum"), list | tuple):
            types &= frozenset(type_of(value) for value in schema["enum"])
        if "const" in schema:
            types &= {type_of(schema["const"])}
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list | tuple) and schema[key]:
                types &= frozenset().union(*(self._types(one, depth - 1) for one in schema[key]))
        if isinstance(schema.get("allOf"), list | tuple):
            for one in schema["allOf"]:
                types &= self._types(one, depth - 1)
        return types | {"integer"} if "number" in types else types

    def _follow(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema that a chain of references within this document leads to."""
        for _ in range(_MAX_DEPTH):
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            found: Any = self._root
            for part in reference[2:].split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                found = found.get(part) if isinstance(found, Mapping) else None
            if not isinstance(found, Mapping):
                return {}
            schema = found
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
