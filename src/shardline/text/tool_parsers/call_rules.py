"""The grammar of tool calls, which each format writes in Lark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.structured.grammar import lark_json, lark_text

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class OfferedFunction:
    """A function that an answer may call; `parameters`: its JSON schema, None if it has no parameters."""

    name: str
    parameters: Mapping[str, Any] | None

    def arguments(self) -> str:
        """Its arguments, in Lark.

        Raises:
            ValueError: `parameters` is no schema.
        """
        schema = _NO_PARAMETERS if self.parameters is None else dict(self.parameters)
        if not schema.keys() & {"type", "$ref", "anyOf", "allOf", "oneOf"}:
            schema["type"] = "object"
        return lark_json(schema)


@dataclass(frozen=True)
class CallRules:
    """What the rules of a format depend on, and their common parts."""

    functions: Sequence[OfferedFunction]
    parallel: bool
    """Whether an answer may have more than one call."""
    template: str
    """The source of the chat template, for formats that have several forms."""
    special_tokens: Mapping[str, int]
    """The marks that are special tokens, and their ids. All other marks are text."""

    def mark(self, mark: str) -> str:
        """A mark of the format."""
        token_id = self.special_tokens.get(mark)
        return lark_text(mark) if token_id is None else f"<[{token_id}]>"

    def function_rules(self, before: str, between: str, after: str) -> str:
        """The rule `function`: a name after the text `before`, then its arguments between two parts in Lark."""
        names = " | ".join(f"function_{index}" for index in range(len(self.functions)))
        rules = [f"function: {names}"]
        for index, function in enumerate(self.functions):
            name = before + function.name
            body = f"{lark_text(name)} {between} {function.arguments()} {after}"
            rules.append(f"function_{index}: {body}")
        return "\n".join(rules)

    def repeated(self, rule: str, separator: str) -> str:
        """One or, if allowed, several calls with a text between them."""
        if not self.parallel:
            return rule
        return f"{rule} ({lark_text(separator)} {rule})*" if separator else f"{rule}+"

    def text_before(self, trigger: str, rule: str = "lead", terminal: str = "TEXT") -> str:
        """A rule for any text up to `trigger`, a mark, and for this mark; `terminal`: a name for the text."""
        if trigger in self.special_tokens:
            return f"{rule}: {terminal} {self.mark(trigger)}\n{terminal}: /(.|\\n)*/"
        return f"{rule}[lazy]: {terminal} {lark_text(trigger)}\n{terminal}: /(.|\\n)*/"
