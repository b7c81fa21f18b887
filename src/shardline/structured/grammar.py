"""What a user asks of an answer's form, as the text of a grammar.

A grammar's text is llguidance's: JSON with a list of parts, each in Lark or as a JSON schema. The first one is the
start; others are referred to by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardline.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

MAX_GRAMMAR_CHARS = 128 * 1024
"""Longest text of a grammar. Compiling takes time in proportion to the square of it: 50 ms for 45,000 characters."""

_NO_TEXT = "NoExtensionBias\n<non-verbose/>"
"""What llguidance says if nothing can follow."""
_TOO_DEEP = "the schema is nested too deeply"
_NO_MATCH = "no text matches the grammar: its rules or references may lead back to themselves"

_WHITESPACE = r"[ \t\n\r]{0,40}"
"""Between the parts of JSON. It is bounded, so that a model cannot write whitespace until the length limit."""
_INDENTATION = r"( |\r?\n( {0,16}|\t{0,8}))?"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ASCII = {
    "d": "0-9",
    "w": "A-Za-z0-9_",
    "s": r" \t\n\r\f\v",
}
"""Classes of characters that have more of them in the compiler's regular expressions than in Python's `re.ASCII`."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of JSON schemas whose value is a map to schemas."""
_COMBINING = ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef")
_BESIDE = ("anyOf", "oneOf", "$ref")
"""They combine schemas only beside `properties`."""
_DATA = ("const", "enum", "default", "example", "examples")


_encode_text = json.JSONEncoder(ensure_ascii=False).encode


def load_compiler() -> None:
    """Import what these functions need. Otherwise the first grammar takes 50 ms longer."""
    import llguidance.gbnf_to_lark  # noqa: F401


def structured_grammar(params: StructuredOutputsParams) -> str:
    """The grammar of a user's parameters. Only a sandbox's worker may call this for a client: see `GrammarChecks`.

    Raises:
        ValueError: the parameters are malformed. (`check_grammar` finds what cannot be compiled.) For structural tags,
            see `structural_tags`.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    check_size([params.json, params.regex, params.choice, params.grammar])
    if params.json is not None:
        schema = params.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"structured_outputs.json is not JSON: {error}") from error
        return schema_grammar(schema, params)
    if params.json_object:
        return schema_grammar({"type": "object"}, params)
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(ascii_classes(params.regex)))
    if params.choice is not None:
        return lark_grammar("start: " + " | ".join(lark_text(text) for text in params.choice))
    assert params.grammar is not None
    try:
        return lark_grammar(any_to_lark(params.grammar))
    except Exception as error:  # the converter raises plain exceptions
        raise ValueError(f"structured_outputs.grammar is neither Lark nor GBNF: {error}") from error


def schema_grammar(schema: Any, params: StructuredOutputsParams | None = None) -> str:
    """The grammar of a JSON schema.

    Raises:
        ValueError: it is no schema.
    """
    return encode_grammar([{"name": "json", "json_schema": json_schema(schema, params)}])


def json_schema(schema: Any, params: StructuredOutputsParams | None = None) -> dict[str, Any]:
    """A schema with our rules for whitespace and for properties that it does not name: unless it or `params` allow
    them, there are none, as with vLLM's default compiler.

    Raises:
        ValueError: it is no schema.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ValueError("a JSON schema must be an object")
    check_size(schema)
    options: dict[str, Any] = _COMPACT
    if params is not None and not params.disable_any_whitespace:
        if params.whitespace_pattern is not None:
            options = {"whitespace_pattern": ascii_classes(params.whitespace_pattern)}
        elif params.disable_any_whitespace is False:
            options = {"whitespace_pattern": _WHITESPACE}
        elif params.json_object:
            options = {"whitespace_pattern": _INDENTATION}
    try:
        given = None if params is None else params.disable_additional_properties
        closed = not _combines(schema) if given is None else given
        return {**_spell_schema(schema, closed), "x-guidance": options}
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def ascii_classes(regex: str) -> str:
    r"""The regular expression with the ASCII characters that `\d`, `\w`, `\s` and their complements stand for."""

    def spell(match: re.Match[str]) -> str:
        chars = _ASCII.get(match[1].lower())
        return match[0] if chars is None else f"[{'^' if match[1].isupper() else ''}{chars}]"

    return re.sub(r"\\(.)", spell, regex, flags=re.DOTALL)


def _spell_schema(schema: Mapping[str, Any], closed: bool) -> dict[str, Any]:
    """The schema with `ascii_classes` in its patterns; `closed`: objects have no properties but those that it names."""
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            value = ascii_classes(value)
        elif key in _MAPS and isinstance(value, Mapping):
            spell = ascii_classes if key == "patternProperties" else str
            value = {spell(k): _spell_schema(v, closed) if isinstance(v, Mapping) else v for k, v in value.items()}
        elif key not in _DATA and isinstance(value, Mapping):
            value = _spell_schema(value, closed)
        elif key not in _DATA and isinstance(value, list):
            value = [_spell_schema(entry, closed) if isinstance(entry, Mapping) else entry for entry in value]
        result[key] = value
    if closed and ("properties" in result or "patternProperties" in result):
        result.setdefault("additionalProperties", False)
    return result


def _combines(schema: Any) -> bool:
    """Whether two schemas may describe one object, so that neither names all of its properties."""
    unread = [schema]
    while unread:
        entry = unread.pop()
        if isinstance(entry, list):
            unread += entry
        elif isinstance(entry, Mapping):
            if not entry.keys().isdisjoint(_COMBINING) or (
                "properties" in entry and not entry.keys().isdisjoint(_BESIDE)
            ):
                return True
            unread += [value for key, value in entry.items() if key not in _DATA]
    return False


def lark_grammar(lark: str) -> str:
    """The grammar of a text in Lark, whose first rule is `start`."""
    return encode_grammar([{"name": "lark", "lark_grammar": lark}])


def lark_text(text: str) -> str:
    """A text as a literal in Lark."""
    return _encode_text(text)


def lark_json(schema: Any) -> str:
    """A JSON value of this schema, in Lark, with at most one space between its parts: models differ in their habits.

    Raises:
        ValueError: it is no schema.
    """
    value = {**json_schema(schema), "x-guidance": {"whitespace_pattern": " ?"}}
    return "%json " + json.dumps(value, ensure_ascii=False)


def wrap_grammar(lark: str, grammar: str) -> str:
    """A grammar in Lark that refers to another one as `@answer`; empty: it refers to none."""
    parts = json.loads(grammar)["grammars"] if grammar else []
    for part in parts[:1]:
        part["name"] = "answer"
    return encode_grammar([{"name": "start", "lark_grammar": lark}, *parts])


def check_grammar(grammar: str) -> None:
    """Refuse a grammar that cannot be compiled, or whose first token cannot be computed.

    Only a sandbox's worker may call this for a client: see `GrammarChecks`.

    Raises:
        ValueError: the message says what it lacks.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken")
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(grammar, None, limits=parser_limits()).strip()
    if problem:
        raise ValueError(problem)
    if "<[" in grammar:
        return  # its special tokens are those of a model
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error().strip().removesuffix(_NO_TEXT) or _NO_MATCH)


class _Bytes:
    """A vocabulary of the 256 bytes, as llguidance asks for one."""

    is_tokenizer_wrapper = True
    tokens = (*(bytes([value]) for value in range(256)), b"<|end|>")
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Bytes(), eos_token=[256])  # type: ignore[arg-type]


def parser_limits() -> LLParserLimits:
    """Bounds of the work for a grammar and for each token, the same in the front and on the ranks."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=50_000, precompute_large_lexemes=False, verbose_errors=False)


def is_larger(value: Any, num_chars: int) -> bool:
    """Whether the values in `value` and their characters are certainly more than so many characters of a grammar."""
    left = num_chars
    unread = [value]
    while unread:
        entry = unread.pop()
        if isinstance(entry, str | Mapping | Sequence):
            left -= len(entry)
            if left < 0:
                return True
        if isinstance(entry, Mapping):
            unread += entry.values()
        elif isinstance(entry, Sequence) and not isinstance(entry, str):
            unread += entry
    return False


def check_size(value: Any) -> None:
    """Refuse what is certainly too large for a grammar, before work is done for it.

    Raises:
        ValueError: it is.
    """
    if is_larger(value, MAX_GRAMMAR_CHARS):
        raise ValueError(f"the grammar is too large: at most {MAX_GRAMMAR_CHARS} characters are taken")


def encode_grammar(parts: Sequence[Mapping[str, Any]]) -> str:
    """The grammar that has these parts; the first one is the start.

    Raises:
        ValueError: a part is nested too deeply.
    """
    try:
        return json.dumps({"grammars": list(parts)}, ensure_ascii=False)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
