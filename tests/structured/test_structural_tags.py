"""Structural tags: free text with parts of a required form, in vLLM's older form and in xgrammar's tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.checkpoints.hub import DEMO_FOLDER
from shardline.sampling_params import StructuredOutputsParams
from shardline.structured.check_service import PARAMS, REFUSED, TAKEN, open_service
from shardline.structured.compiler import GrammarCompiler
from shardline.structured.structural_tags import structural_tag_grammar
from tests.structured.test_grammar import accepts

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OBJECT = {"type": "object"}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler((Path(DEMO_FOLDER) / "tokenizer.json").read_bytes())


def structures(triggers: list[str], *tags: tuple[str, Any, str]) -> dict[str, Any]:
    described = [{"begin": begin, "schema": schema, "end": end} for begin, schema, end in tags]
    return {"type": "structural_tag", "structures": described, "triggers": triggers}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(trigger: str, *tags: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags), **options}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


TEXT = {"type": "any_text"}
VALUE = tag("<a>", const("v"), "</a>")
CALL = tag("<f=a>", {"type": "json_schema", "json_schema": SCHEMA}, "</f>")


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        (
            structures(["<f="], ("<f=a>", SCHEMA, "</f>"), ("<f=b>", OBJECT, "</f>")),
            ["", "hi", 'x <f=a>{"a": 1}</f> y <f=b>{}</f>', '<f=a>{"a": 1}</f>'],
            ["<f=c>{}</f>", "<f=a>{}</f>", "x <f=", '<f=a>{"a": 1}</f> <f=x'],
        ),
        (
            structures(["<f>", "[g]"], ("<f>", SCHEMA, "</f>"), ("[g]", OBJECT, "[/g]")),
            ['a <f>{"a": 1}</f> [g]{}[/g] b', "[x] <g>"],
            ["<f>{}</f>", "[g]1[/g]"],
        ),
        (
            {"type": "sequence", "elements": [tag("<t>", TEXT, "</t>"), triggered("<f=", CALL)]},
            ["<t>hm</t>ok", "<t></t>", '<t>hm <f=</t>x<f=a>{"a": 1}</f>'],
            ["ok", "<t>x", "<t>a</t><f=b"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [tag("<a>", {"type": "regex", "pattern": "[0-9]/x+"}, "</a>")],
                "separator": ",",
            },
            ["", "<a>1/xx</a>", "<a>1/x</a>,<a>2/x</a>"],
            ["<a>1</a>", "<a>1/x</a>,", "x"],
        ),
        (triggered("<a", VALUE, at_least_one=True), ["<a>v</a>", "<a>v</a> x <a>v</a>"], ["", "x<a>v</a>"]),
        (triggered("<a", VALUE, stop_after_first=True), ["x", "x<a>v</a>"], ["<a>v</a>x"]),
        (triggered("<a", VALUE, at_least_one=True, stop_after_first=True), ["<a>v</a>"], ["", "<a>v</a>x"]),
        (triggered("<a", VALUE, excludes=["<b>"]), ["x <a>v</a> y"], ["<b>", "<a>v</a><b>"]),
        (tag("<a>", const("v"), ["</a>", "</b>"]), ["<a>v</a>", "<a>v</b>"], ["<a>v", "<a>v</c>"]),
        (tag("<a>", const("v"), ["</a>", ""]), ["<a>v</a>", "<a>v"], ["<a>v</b>"]),
        (tag("<o>", triggered("<a", VALUE), "</o>"), ["<o></o>", "<o>x<a>v</a>y</o>"], ["<o>x</o>y", "<o><a>w"]),
        ({"type": "any_text", "excludes": ["foo", "a/b"]}, ["fo", "x\ny"], ["a foo", "xa/b"]),
        (
            {"type": "or", "elements": [const("x"), {"type": "grammar", "grammar": 'root ::= "q" [0-9]'}]},
            ["x", "q1"],
            ["q", "y"],
        ),
        ({"type": "repeat", "content": const("yz"), "min": 2, "max": 3}, ["yzyz", "yzyzyz"], ["yz", "yzyzyzyz"]),
        ({"type": "plus", "content": tag("<o>", TEXT, "</o>")}, ["<o></o>", "<o>x</o><o></o>"], ["", "<o>x</o>y"]),
    ],
)
def test_an_answer_has_the_form_of_its_tags(
    compiler: GrammarCompiler, given: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    whole = given if "structures" in given else {"type": "structural_tag", "format": given}
    grammar = structural_tag_grammar(json.dumps(whole), StructuredOutputsParams(structural_tag=whole))
    for text in good:
        assert accepts(compiler, grammar, text), text
    for text in bad:
        assert not accepts(compiler, grammar, text), text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{", "structural_tag is not JSON"),
        ("[]", "structural_tag must be an object"),
        ({"structures": []}, "missing required field `triggers`"),
        (structures(["<f="]), "must have tags"),
        (structures(["<f="], ("<g>", SCHEMA, "</g>")), "'<g>' must begin with exactly one of the triggers"),
        ({"format": {"type": "token", "token": 3}}, "'format' has the type 'token'; supported are any_text"),
        ({"format": {"type": "sequence", "elements": [TEXT, const("x")]}}, "only the last element"),
        ({"format": {"type": "star", "content": TEXT}}, "cannot be repeated"),
        ({"format": {"type": "json_schema", "json_schema": SCHEMA, "style": "qwen_xml"}}, "supported is 'json'"),
        ({"format": tag("a", {"type": "json_schema", "json_schema": 3}, "b")}, "'format.content.json_schema'"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(given: Any, reason: str) -> None:
    answer = open_service("")(PARAMS + msgspec.json.encode(StructuredOutputsParams(structural_tag=given)))
    assert answer[:1] == REFUSED
    assert reason in answer.decode()


def test_the_sandbox_writes_structural_tags() -> None:
    given = json.dumps(structures(["<f="], ("<f=a>", SCHEMA, "</f>")))
    answer = open_service("")(PARAMS + msgspec.json.encode(StructuredOutputsParams(structural_tag=given)))
    assert answer[:1] == TAKEN
