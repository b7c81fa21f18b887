"""The input of custom tools, cut into pieces at every place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.text.custom_input import CustomInput, write_input
from shardline.text.tool_parsers import find_tool_parser
from shardline.text.tool_parsers.base import OfferedFunction


def decode(text: str) -> str:
    """The input in one piece; it must be the same in single characters."""
    whole = CustomInput().add_json(text)
    pieces = CustomInput()
    assert "".join(map(pieces.add_json, text)) == whole
    return whole


@given(text=st.text(max_size=20), escaped=st.booleans())
def test_inputs_are_decoded(text: str, escaped: bool) -> None:
    assert decode(json.dumps({"input": text}, ensure_ascii=escaped)) == text
    assert decode(write_input(text)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (' {\n"input" : "a\\"b\\\\n" }', 'a"b\\n'),
        ('{"input": "line\nbreak"', "line\nbreak"),
        ('{"input": "\\ud83dx\\q', "\ufffdx\\q"),
        ('{"input": "a\\u00', "a"),
        ('{"other": 1}', '{"other": 1}'),
        ("SELECT 1", "SELECT 1"),
        ("{}", "{}"),
        ("", ""),
    ],
)
def test_what_is_no_such_json_stays(text: str, expected: str) -> None:
    assert decode(text) == expected


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
def test_calls_of_custom_tools_in_any_format(name: str) -> None:
    answers = {
        "hermes": '<tool_call>{"name": "sql", "arguments": {"input": "a \\"b\\""}}</tool_call>',
        "qwen3_coder": '<tool_call>\n<function=sql>\n<parameter=input>\na "b"\n</parameter>\n</function>\n</tool_call>',
        "pythonic": "[sql(input='a \"b\"')]",
    }
    properties = {"input": {"type": "string"}}
    parser = find_tool_parser(name)([OfferedFunction("sql", {"properties": properties}, is_custom=True)])
    deltas = [*map(parser.add_text, answers[name]), parser.end_text()]
    calls = [call for delta in deltas for call in delta.calls]
    assert all(call.is_custom for call in calls)
    assert "".join(call.arguments for call in calls) == 'a "b"'
