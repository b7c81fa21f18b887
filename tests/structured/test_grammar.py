"""Grammars: what is taken, what is refused and why, and what matchers allow."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from shardline.checkpoints.hub import DEMO_FOLDER
from shardline.sampling_params import SamplingParams, StructuredOutputsParams
from shardline.structured.compiler import GrammarCompiler, Matcher
from shardline.structured.grammar import check_grammar, schema_grammar, structured_grammar, wrap_grammar
from shardline.text.tokenizer import Tokenizer
from shardline.text.tool_parsers import find_tool_parser, tool_parser_names
from shardline.text.tool_parsers.base import CallRules, OfferedFunction
from tests.text.answers import gpt_oss_template, k2_horizon_json, llama4_pythonic, mistral_v11
from tests.text.builders import byte_fallback_json, byte_level_json, metaspace_json
from tests.text.test_answer_parsers import FORMS

TOKENIZER = Tokenizer.from_folder(Path(DEMO_FOLDER))
assert TOKENIZER is not None


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler((Path(DEMO_FOLDER) / "tokenizer.json").read_bytes())


def follow(compiler: GrammarCompiler, grammar: str, text: str) -> Matcher | None:
    """The matcher after `text`; None: the grammar does not allow it."""
    check_grammar(grammar)
    matcher = compiler.start_grammar(grammar)
    assert TOKENIZER is not None
    for token_id in TOKENIZER.encode_text(text, add_special_tokens=False):
        if matcher.is_finished:
            return None
        words, _ = matcher.find_allowed()
        if not words[token_id >> 5] >> (token_id & 31) & 1:
            return None
        matcher.append_token(token_id, is_end=False)
    return matcher


def accepts(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    """Whether the whole answer may be `text`."""
    matcher = follow(compiler, grammar, text)
    return matcher is not None and (matcher.is_finished or matcher.find_allowed()[1])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


OPTIONAL = {"anyOf": [{"type": "null"}, {"type": "integer"}]}
NAMES_A = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        ({"json": SCHEMA}, ['{"a": 1}'], ["{}", '{"a": "x"}', '{"b": 1}', '{"a": 1', '{ "a": 1}', '{"a":  1}']),
        (
            {"json": SCHEMA, "disable_any_whitespace": False},
            ['{"a": 1}', '{ "a"\n:1}', '{"a":' + " " * 40 + "1}"],
            ['{"a":' + " " * 41 + "1}"],
        ),
        ({"json": json.dumps(SCHEMA)}, ['{"a": 1}'], ["{}"]),
        ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"a": 1}'], ['{ "a": 1}', '{"a":  1}']),
        (
            {"json": {"type": "array", "items": {"properties": {"a": {}}}}, "disable_additional_properties": True},
            ['[{"a": 1}]', "[{}]"],
            ['[{"a": 1, "b": 2}]'],
        ),
        (
            {"json": {"properties": {"a": {}}, "additionalProperties": {}}, "disable_additional_properties": True},
            ['{"a": 1, "b": 2}'],
            ["{"],
        ),
        ({"json": {"properties": {"a": {}}}}, ['{"a": 1}', "{}"], ['{"b": 1}', '{"a": 1, "b": 2}']),
        ({"json": {"properties": {"a": OPTIONAL}}}, ['{"a": null}'], ['{"b": 1}']),
        ({"json": {"properties": {"a": {}}, "additionalProperties": True}}, ['{"a": 1, "b": 2}'], ["{"]),
        ({"json": {"properties": {"a": {}}}, "disable_additional_properties": False}, ['{"b": 1}'], ["{"]),
        ({"json": {"type": "object"}}, ['{"b": 1}'], ["1"]),
        ({"json": {"allOf": [NAMES_A, {"properties": {"b": {}}}]}}, ['{"a": 1, "b": 2}'], ['{"a": "x"}']),
        ({"json": {**NAMES_A, "anyOf": [{"properties": {"b": {}}}]}}, ['{"a": 1, "b": 2}'], ['{"a": "x"}']),
        ({"json": SCHEMA, "whitespace_pattern": "x?"}, ['{"a":x1}', '{"a":1}'], ['{"a": 1}']),
        (
            {"json_object": True},
            ["{}", '{"x": [1, null]}', '{"x":1}', '{\n  "x": [\n    1\n  ]\n}'],
            ["[]", "3", '{"x":  1}', '{\n\n"x": 1}', '{\n"x": 1 \n}'],
        ),
        ({"json_object": True, "disable_any_whitespace": True}, ['{"x": 1}'], ['{"x":1}', '{\n"x": 1}']),
        ({"json_object": True, "disable_any_whitespace": False}, ['{\n\n"x":  1}'], ["[]"]),
        ({"regex": r"\d{2}[\d\-]"}, ["123", "12-"], ["\U0001fbf8\U0001fbf8\U0001fbf8", "١٢٣", "12\U0001fbf8"]),
        ({"regex": r"\w\W\s\S\D"}, ["a-\t..", "_é é٣"], ["é- ..", "a-\u2003..", "a- .1", "a-  ."]),
        ({"regex": r"\\d[^\d]"}, ["\\d٣"], ["1a", "\\d1"]),
        ({"json": {"type": "string", "pattern": r"^\d+$"}}, ['"12"'], ['"١٢"']),
        (
            {"json": {"type": "object", "properties": {"pattern": {"items": {"pattern": r"^\w$", "type": "string"}}}}},
            ['{"pattern": ["a"]}'],
            ['{"pattern": ["é"]}'],
        ),
        ({"json": {"enum": [r"\d"]}}, [r'"\\d"'], ['"[0-9]"', '"1"']),
        ({"regex": "[0-9]+é?"}, ["12", "1é"], ["", "x", "1éé"]),
        ({"choice": ["yes", "no", 'a "b"']}, ["yes", 'a "b"'], ["maybe", "ye"]),
        ({"grammar": 'start: "x" /[0-9]/'}, ["x1"], ["x", "1"]),
        ({"grammar": 'root ::= "a" | "b"'}, ["a", "b"], ["ab"]),
    ],
)  # fmt: skip
def test_forms(compiler: GrammarCompiler, params: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = structured_grammar(StructuredOutputsParams(**params))
    for text in good:
        assert accepts(compiler, grammar, text), text
    for text in bad:
        assert not accepts(compiler, grammar, text), text


def test_a_finished_grammar_is_finished(compiler: GrammarCompiler) -> None:
    matcher = follow(compiler, schema_grammar(SCHEMA), '{"a": 1}')
    assert matcher is not None
    assert matcher.is_finished
    number = follow(compiler, structured_grammar(StructuredOutputsParams(regex="[0-9]+")), "12")
    assert number is not None
    assert not number.is_finished
    assert number.find_allowed()[1]
    number.append_token(2, is_end=True)
    assert number.is_finished


def test_sequences_have_their_own_matchers(compiler: GrammarCompiler) -> None:
    grammar = schema_grammar(SCHEMA)
    first, second = compiler.start_grammar(grammar), compiler.start_grammar(grammar)
    before = second.find_allowed()[0].copy()
    assert TOKENIZER is not None
    first.append_token(TOKENIZER.encode_text("{", add_special_tokens=False)[0], is_end=False)
    assert (second.find_allowed()[0] == before).all()
    assert (first.find_allowed()[0] != before).any()


def test_a_tokenizer_that_cannot_be_used_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be used with grammars"):
        GrammarCompiler(b'{"version": "1.0"}')


@pytest.mark.parametrize("source", [byte_level_json, metaspace_json, byte_fallback_json])
def test_kinds_of_tokenizers(source: Any) -> None:
    compiler = GrammarCompiler(source().encode())
    matcher = compiler.start_grammar(structured_grammar(StructuredOutputsParams(regex="(a| )+")))
    backend = tokenizers.Tokenizer.from_str(source())
    words, may_end = matcher.find_allowed()
    allowed = [token for token in range(backend.get_vocab_size()) if words[token >> 5] >> (token & 31) & 1]
    assert not may_end
    assert allowed
    for token in allowed:
        spelled = (
            str(backend.id_to_token(token))
            .replace("▁", " ")
            .replace("Ġ", " ")
            .replace("<0x61>", "a")
            .replace("<0x20>", " ")
        )
        assert set(spelled) <= {"a", " "}, spelled


def test_added_tokens_are_text_unless_they_are_special() -> None:
    backend = tokenizers.Tokenizer.from_file(str(Path(DEMO_FOLDER) / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<tool_call>", special=False), "[PLAIN]"])
    backend.add_special_tokens(["[SPECIAL]"])
    own = GrammarCompiler(backend.to_str().encode())

    def allows(lark: str, *before: str) -> set[str]:
        matcher = own.start_grammar(wrap_grammar(lark, ""))
        for token in before:
            token_id = backend.token_to_id(token)
            assert token_id is not None
            matcher.append_token(token_id, is_end=False)
        words, _ = matcher.find_allowed()
        added = [(token, backend.token_to_id(token)) for token in ("<tool_call>", "[PLAIN]", "[SPECIAL]")]
        return {token for token, i in added if i is not None and words[i >> 5] >> (i & 31) & 1}

    text = 'start: lead "x"\nlead[lazy]: TEXT "<tool_call>"\nTEXT: /(.|\\n)*/\n'
    assert allows(text) == {"<tool_call>", "[PLAIN]"}
    assert allows(text, "[PLAIN]", "<tool_call>") == set()
    special = backend.token_to_id("[SPECIAL]")
    assert allows(f'start: TEXT <[{special}]> "x"\nTEXT: /(.|\\n)*/\n') == {"<tool_call>", "[PLAIN]", "[SPECIAL]"}


def deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"$ref": "#/$defs/x"}}, "x"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-ahead"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": "{"}, "JSON"),
        ({"json": "[]"}, "object"),
        ({"json": deep_schema(400)}, "recursion"),
        ({"json": deep_schema(5000)}, "too deeply"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: unknown"}, "unknown"),
        ({"grammar": 'start: "a"' + ' | "b"' * 100_000}, "characters"),
    ],
)
def test_refusals_name_the_problem(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_grammar(structured_grammar(StructuredOutputsParams(**params)))


@pytest.mark.parametrize(
    "params", [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": [""]}, {"json_object": False}]
)
def test_one_form_must_be_set(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="structured_outputs"):
        StructuredOutputsParams(**params)
    assert SamplingParams(structured_outputs=None).structured_outputs is None


def test_a_repetition_of_repetitions_is_cheap(compiler: GrammarCompiler) -> None:
    started = time.process_time()
    grammar = structured_grammar(StructuredOutputsParams(regex="(a{1,1000}){1,1000}"))
    matcher = compiler.start_grammar(grammar)
    check_grammar(grammar)
    matcher.find_allowed()
    assert time.process_time() - started < 2


FUNCTIONS = [OfferedFunction("f", {**NAMES_A, "required": ["a"]}), OfferedFunction("weather", None)]
CALLS = [("f", '{"a": 1}'), ("weather", "{}")]


# The first form needs special tokens that the demo's tokenizer lacks; the second one is only read.
# The third one is that of another format, too; k2_horizon's JSON is only read.
READ_ONLY = (mistral_v11, gpt_oss_template, llama4_pythonic, k2_horizon_json)
TEXT_FORMS = [form for form in FORMS if form[1] not in READ_ONLY]
TEMPLATES = {"deepseek_v3": "```json", "glm47_moe": "</arg_key><arg_value>", "deepseek_v4": "<｜DSML｜tool_calls>"}


@pytest.mark.parametrize(("name", "write"), TEXT_FORMS, ids=[writer.__name__ for _, writer in TEXT_FORMS])
def test_calls_in_every_format(compiler: GrammarCompiler, name: str, write: Any) -> None:
    template = TEMPLATES.get(write.__name__, "")
    content = 'Hello {"name": 1} <x>'

    def grammar(rule: str, parallel: bool = True) -> str:
        rules = find_tool_parser(name).write_rules(CallRules(FUNCTIONS, parallel, template, {}))
        return wrap_grammar(f"start: answer\nanswer: {rule}\n{rules}", "")

    both, wrong, unknown = write(CALLS), write([("f", '{"b": 1}')]), write([("f", '{"a": 1, "b": 2}')])
    for rule in ("calls", "auto"):
        assert accepts(compiler, grammar(rule), both)
        assert accepts(compiler, grammar(rule), write(CALLS[:1]))
        assert not accepts(compiler, grammar(rule), wrong)
        assert not accepts(compiler, grammar(rule), unknown)
        assert not accepts(compiler, grammar(rule, parallel=False), both)
        assert accepts(compiler, grammar(rule, parallel=False), write(CALLS[:1]))
    assert accepts(compiler, grammar("auto"), "<|channel|>final<|message|>" + content if name == "gpt_oss" else content)
    assert not accepts(compiler, grammar("calls"), "Hello")


LIMITED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "pattern": "^[A-Z]/[a-z]+$", "maxLength": 5},
        "unit": {"enum": ["C", "F", None]},
        "day": {"$ref": "#/$defs/day"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["unit"],
    "$defs": {"day": {"type": "integer", "minimum": 1}},
}


@pytest.mark.parametrize("special", [False, True])
def test_arguments_as_text_follow_their_schemas(compiler: GrammarCompiler, special: bool) -> None:
    functions = [OfferedFunction("f", LIMITED), OfferedFunction("any", {"type": "object"})]
    # If a mark is a special token, this test spells it with a token that is none, which llguidance takes, too.
    assert TOKENIZER is not None
    [end] = TOKENIZER.encode_text("\x1f", add_special_tokens=False)
    marks = {"</arg_value>": end} if special else {}
    rules = find_tool_parser("glm4_moe").write_rules(CallRules(functions, True, "", marks))
    grammar = wrap_grammar(f"start: calls\n{rules}", "")

    def takes(*arguments: tuple[str, str], function: str = "f") -> bool:
        text = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
        text = f"<tool_call>{function}\n{text}</tool_call>"
        return accepts(compiler, grammar, text.replace("</arg_value>", "\x1f") if special else text)

    assert takes(("place", "A/bcd"), ("unit", "C"), ("day", "3"), ("note", "a <b>\n"))
    assert takes(("unit", "null"), ("note", ""))
    assert not takes(("place", "A/bcd"))
    assert not takes(("unit", "K"))
    assert not takes(("place", "A/bcde"), ("unit", "C"))
    assert not takes(("place", "a/b"), ("unit", "C"))
    assert not takes(("unit", "C"), ("day", "0"))
    assert not takes(("unit", "C"), ("day", "x"))
    assert not takes(("unit", "C"), ("other", "x"))
    assert takes(("x", "1"), ("y z", "</b>"), function="any")
    assert takes(function="any")


def test_arguments_with_names_follow_their_schemas(compiler: GrammarCompiler) -> None:
    properties: dict[str, Any] = {"a": {"type": "string"}, "b": {"type": "boolean"}, "c": {"type": "array"}}
    functions = [
        OfferedFunction("f", {"type": "object", "properties": properties, "required": ["b"]}),
        OfferedFunction("free", {"type": "object", "properties": properties}),
        OfferedFunction("any", {"type": "object"}),
    ]
    rules = find_tool_parser("pythonic").write_rules(CallRules(functions, True, "", {}))
    grammar = wrap_grammar(f"start: calls\n{rules}", "")
    good = ['f(a="x", b=True)', "f(b=False)", "f(b=False, c=[1, 2])", "free()", "free(b=True)", 'free(a="x", c=[])']
    for call in [*good, "any()", 'any(y=1, z="a")']:
        assert accepts(compiler, grammar, f"[{call}]"), call
    for call in ('f(a="x")', "f()", "f(, b=True)", "f(b=true)", 'free(b=True, a="x")', "free(a=1)", "free(d=1)"):
        assert not accepts(compiler, grammar, f"[{call}]"), call


def test_nested_arguments_between_marks_follow_their_schemas(compiler: GrammarCompiler) -> None:
    kinds = {"type": "object", "properties": {"k": {"enum": ["x", None]}}, "required": ["k"]}
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "boolean"},
            "c": {"type": "array", "items": kinds},
            "d": {"$ref": "#/$defs/day"},
        },
        "required": ["b"],
        "$defs": {"day": {"type": ["integer", "null"], "minimum": 1}},
    }
    functions = [OfferedFunction("f", parameters), OfferedFunction("any", {"type": "object"})]
    rules = find_tool_parser("gemma4").write_rules(CallRules(functions, True, "", {}))
    grammar = wrap_grammar(f"start: calls\n{rules}", "")

    def takes(call: str) -> bool:
        text = call.replace("'", '<|"|>')
        return accepts(compiler, grammar, f"<|tool_call>call:{text}<tool_call|>")

    for call in ("f{a:'x, y',b:true}", "f{b:false}", "f{b:true,c:[{k:'x'},{k:null}]}", "f{b:true,c:[],d:3}", "any{}"):
        assert takes(call), call
    assert takes("any{q:[1,{z:''}]}")
    for call in ("f{}", "f{b:true,c:[{k:'z'}]}", "f{b:true,c:[{}]}", "f{b:true,d:0}", "f{b:1}", "any{q}"):
        assert not takes(call), call


def test_every_format_has_rules() -> None:
    for name in tool_parser_names():
        for special in ({}, dict.fromkeys(find_tool_parser(name).markers, 3)):
            rules = find_tool_parser(name).write_rules(CallRules(FUNCTIONS, True, "", special))
            for rule in ("calls", "auto"):
                check_grammar(wrap_grammar(f"start: answer\nanswer: {rule}\n{rules}", ""))
