"""The count of JSON values, whatever stands in strings and wherever slices end."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.server.errors import ApiError
from shardline.server.openai import body_size
from shardline.server.openai.body_size import check_json_size


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.text('ab"\\,:{[é', max_size=12), max_size=8), size=st.integers(2, 9))
def test_strings_do_not_count(texts: list[str], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_size, "_SLICE_BYTES", size)
        patch.setattr(body_size, "MAX_VALUES", 8)
        patch.setattr(body_size, "MAX_OBJECTS", 1)
        check_json_size(json.dumps(texts).encode())
        with pytest.raises(ApiError):
            check_json_size(json.dumps([*texts, []]).encode())


@pytest.mark.parametrize("body", [b',,["\\', b',,["abc', b',,["', b',"",""""'])
def test_broken_json_ends_the_count(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_size, "MAX_OBJECTS", 0)
    monkeypatch.setattr(body_size, "MAX_VALUES", 2)
    if b"[" in body:
        with pytest.raises(ApiError):
            check_json_size(body)
    else:
        check_json_size(body)
