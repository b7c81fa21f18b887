"""The count and the parsing of JSON, whatever stands in strings and wherever slices end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.server import json_body, large_json
from shardline.server.errors import ApiError
from shardline.server.json_body import check_template_values, parse_json
from shardline.server.large_json import check_size


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.text('ab"\\,:{[é', max_size=12), max_size=8), size=st.integers(2, 9))
def test_strings_do_not_count(texts: list[str], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "COUNTED_BYTES", size)
        patch.setattr(large_json, "SLICE_BYTES", size)
        patch.setattr(large_json, "MAX_VALUES", 8)
        patch.setattr(large_json, "MAX_OBJECTS", 1)
        check_size(json.dumps(texts).encode())
        with pytest.raises(ApiError):
            check_size(json.dumps([*texts, []]).encode())


@pytest.mark.parametrize("body", [b',,["\\', b',,["abc', b',,["', b',"",""""'])
def test_broken_json_ends_the_count(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "MAX_OBJECTS", 0)
    monkeypatch.setattr(large_json, "MAX_VALUES", 2)
    if b"[" in body:
        with pytest.raises(ApiError):
            check_size(body)
    else:
        check_size(body)


JSON_VALUES = st.recursive(
    st.none() | st.integers() | st.text('ab"\\/\n\u00e9\u4e2d\U0001f642u0d8'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\\\u00e9", max_size=20), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(value=JSON_VALUES, size=st.integers(13, 20), ascii_only=st.booleans())
def test_texts_in_slices_are_those_of_the_parser(value: object, size: int, ascii_only: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "SLICE_BYTES", size)
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize("text", [r"\ud83d", r"\ud83dx", r"\udc00", r"\u12", r"\q", r"\ud83d\n", "\n", r"\n" + "\xff"])
def test_slices_refuse_what_the_parser_refuses(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "SLICE_BYTES", 16)
    for before in range(20):
        with pytest.raises(ValueError, match=r"\w"):
            parse_json(f'["{"a" * before}{text}{"x" * 20}\\n"]'.encode("latin-1"))


NUMBERS: st.SearchStrategy[list[Any]] = st.lists(
    st.integers(0, 99) | st.floats(0, 9) | st.just({}) | st.none(), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(
    arrays=st.lists(NUMBERS | st.lists(NUMBERS, max_size=2) | st.text("a,[]", max_size=3), max_size=4),
    size=st.integers(2, 9),
)
def test_arrays_in_slices_are_those_of_the_parser(arrays: list[object], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "SLICE_BYTES", size)
        patch.setattr(large_json, "ARRAY_BYTES", size)
        assert parse_json(json.dumps(arrays, indent=1).encode()) == arrays
        assert parse_json(json.dumps({"a": arrays}).encode()) == {"a": arrays}


@pytest.mark.parametrize(
    "body",
    [
        "[1,2,3,]",
        "[,1,2,3]",
        "[1,2,,3,4]",
        "[11 2,3]",
        "[1,2,3,NaN]",
        "[1,2,3,4",
        "{[1,2,3]:1}",
        "[1,2,3]]",
        "[ , , ,]",
    ],
)
def test_slices_of_arrays_refuse_what_the_parser_refuses(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in range(1, 8):
        monkeypatch.setattr(large_json, "SLICE_BYTES", size)
        monkeypatch.setattr(large_json, "ARRAY_BYTES", size)
        with pytest.raises(ValueError, match=r"\w"):
            parse_json(body.encode())


def test_a_body_that_ends_within_a_string_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "SLICE_BYTES", 16)
    body = b'["' + rb"\\n" * 20 + b'", "' + rb"\\\\" * 20
    for end in range(1, len(body) + 1):
        with pytest.raises(ValueError, match="EOF while parsing"):
            parse_json(body[:end])


def test_many_strings_and_long_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "MAX_STRINGS", 2)
    monkeypatch.setattr(large_json, "MAX_BARE_BYTES", 8)
    for body in (b'["a","b,\\"",""]', b"[12345678]"):
        with pytest.raises(ApiError, match="bytes outside strings"):
            check_size(body)
    check_size(b'["\\"\\"\\"\\"\\"\\"\\"",""]')


def test_values_for_templates_are_counted_at_every_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MAX_TEMPLATE_VALUES", 6)
    check_template_values("tools", [{"a": [1, {"b": "text"}], "c": []}])
    fields: list[Any] = [[1] * 7, [[[[[[[]]]]]]], [{"a": 1, "b": {"c": [1, 2, 3]}}]]
    for field in fields:
        with pytest.raises(ApiError, match="'tools' has more than 6 values"):
            check_template_values("tools", [field])
