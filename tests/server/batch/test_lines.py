"""Lines of batch files."""

from __future__ import annotations

import io
import json

import pytest

from shardline.server.errors import ApiError
from shardline.server.openai.batch.lines import (
    Answer,
    Line,
    NoRequest,
    RepeatedIds,
    count_requests,
    parse_request,
    read_lines,
)

URLS = {"/v1/completions"}
GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def line(entry: object) -> Line:
    return Line(3, entry if isinstance(entry, bytes) else json.dumps(entry).encode())


def test_blank_lines_count_and_are_no_lines() -> None:
    found = list(read_lines(io.BytesIO(b"\xef\xbb\xbf{}\r\n\n  \n[1]"), 100))
    assert found == [Line(1, b"{}"), Line(4, b"[1]")]


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole() -> None:
    text = b'{"custom_id": "long", "body": "' + b"x" * 5_000_000 + b'"}\n{"custom_id": "b"}\n'
    first, second = read_lines(io.BytesIO(text), 64)
    assert (first.is_too_long, first.custom_id, len(first.text)) == (True, "long", 65)
    assert second == Line(2, b'{"custom_id": "b"}')
    with pytest.raises(NoRequest, match="Line 1 is longer than 65 bytes"):
        parse_request(first, URLS)


def test_a_request() -> None:
    request = parse_request(line(GOOD), URLS)
    assert (request.custom_id, request.url, json.loads(bytes(request.body))) == (
        "a",
        "/v1/completions",
        {"prompt": "x"},
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (b'{"custom_id": "a", "method"', "not JSON"),
        (b'{"custom_id": "a", "body": \xff}', "not JSON"),
        (b'{"custom_id": "a", "n": NaN}', "not JSON"),
        (b"[" * 100_000, "not"),
        (b'{"custom_id": "a", "body": ' + b"[" * 100_000, "not"),
        (b"7", "Expected `object`"),
        ({**GOOD, "custom_id": 7}, "custom_id"),
        ({name: value for name, value in GOOD.items() if name != "url"}, "missing required field `url`"),
        ({**GOOD, "body": ["x"]}, "Expected `object`"),
    ],
)
def test_broken_lines(entry: object, message: str) -> None:
    with pytest.raises(NoRequest, match=message):
        parse_request(line(entry), URLS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "GET"}, "must be POST"),
        ({"url": "/v1/files"}, "Supported endpoints: /v1/completions"),
        ({"body": {"stream": True}}, "cannot be streamed"),
    ],
)
def test_requests_that_no_batch_may_have(change: dict[str, object], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse_request(line({**GOOD, **change}), URLS)
    assert not isinstance(caught.value, NoRequest)


def test_the_id_of_a_broken_line() -> None:
    assert line(b'{"custom_id": "caf\\u00e9", "method').custom_id == "café"
    assert line(b"{").custom_id == "line-3"
    assert line(b'{"custom_id": "\xff"').custom_id == "line-3"


def test_an_id_inside_the_body_is_not_the_requests() -> None:
    assert line({"body": {"metadata": {"custom_id": "inner"}}, "custom_id": "outer"}).custom_id == "outer"


def test_each_custom_id_is_unique() -> None:
    many = "".join(f'{{"custom_id": "{number % 7 if number < 14 else number}"}}\n' for number in range(30))
    with pytest.raises(RepeatedIds, match=r"each custom_id must be unique: .* is in lines ") as caught:
        count_requests(io.BytesIO(many.encode()), 100)
    assert str(caught.value).count(" is in lines ") == 5
    twice = b'{"custom_id": "a"}\n\n{"custom_id": "b"}\n' + b'{"custom_id": "a", "method"\n' * 7
    with pytest.raises(RepeatedIds, match=r"unique: 'a' is in lines 1, 4, 5, 6, 7 and 3 more$") as caught:
        count_requests(io.BytesIO(twice), 100)
    assert caught.value.line == 4
    file = io.BytesIO(b'{\n{\n{"custom_id": "line-3"}')
    assert count_requests(file, 100) == 3
    assert file.tell() == 0


def test_ids_of_answers_depend_on_line_and_model() -> None:
    ids = {entry.answer_id(model) for entry in (Line(1, b"a"), Line(2, b"a"), Line(1, b"b")) for model in "xy"}
    assert len(ids) == 6
    assert Line(1, b"a").answer_id("x") == Line(1, b"a").answer_id("x")


def test_answers_as_both_write_them() -> None:
    good = Answer("i", "c", 200, b'{"x":1}')
    wrong = Answer("i", "c", 404, b'{"error":{"message":"m","code":"k"}}')
    broken = Answer("i", "c", 400, b'{"error":{"message":"m","code":"k"}}', is_request=False)
    error = {"message": "m", "code": "k"}
    frame = {"id": "i", "custom_id": "c"}
    for in_body in (False, True):
        body = {"status_code": 200, "request_id": "i", "body": {"x": 1}}
        assert json.loads(good.encode(errors_in_body=in_body)) == {**frame, "response": body, "error": None}
    empty = {"status_code": 404, "request_id": "i", "body": None}
    assert json.loads(wrong.encode(errors_in_body=False)) == {**frame, "response": empty, "error": error}
    told = {**empty, "body": {"error": error}}
    assert json.loads(wrong.encode(errors_in_body=True)) == {**frame, "response": told, "error": None}
    assert json.loads(broken.encode(errors_in_body=True)) == {**frame, "response": None, "error": error}
