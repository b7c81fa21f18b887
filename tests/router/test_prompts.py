"""What the router reads of a body."""

from __future__ import annotations

import json

import pytest

from shardline.router.prompts import Prompt, cached_share, read_prompt


def read(**fields) -> Prompt:
    return read_prompt(json.dumps(fields).encode())


def test_a_longer_conversation_begins_like_a_shorter_one() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    short, long = (read(model="m", messages=messages[:count], tools=[{"a": 1}]).text for count in (1, 2))
    assert long.startswith(short.rstrip(b"]"))


def test_models_salts_and_keys_share_nothing() -> None:
    plain = read(model="m", prompt="a")
    assert (plain.model, plain.text) == ("m", b"a")
    others = [read(model="n", prompt="a"), read(model="m", prompt="a", cache_salt="s")]
    assert len({(one.model, one.salt) for one in (plain, *others)}) == 3
    again = read(model="m", prompt="b", temperature=1.0)
    assert (again.model, again.salt) == (plain.model, plain.salt)
    sessions = [read(user="u"), read(user="u", prompt_cache_key="k"), read(user=["u"])]
    assert [one.session for one in sessions] == ["u", "k", ""]
    assert read_prompt(b'{"user": "u"}', "header").session == "header"


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "\\ud800"}', b"[]", b"5", b'{"a": "\xff"}', b"[" * 100_000])
def test_what_is_no_request_has_no_prompt(body: bytes) -> None:
    assert read_prompt(body) == Prompt()


def test_token_ids_are_a_prompt() -> None:
    assert read(prompt=[1, 2, 3]).text == b"[1,2,3]"


def test_what_was_cached_is_in_the_usage() -> None:
    chat = b'"usage":{"prompt_tokens":40,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":30}}'
    response = b'"usage": {"input_tokens": 40, "input_tokens_details": {"cached_tokens": 0}}'
    assert [cached_share(chat), cached_share(response), cached_share(b'"prompt_tokens":40')] == [0.75, 0.0, None]
    assert cached_share(b'"prompt_tokens":0,"cached_tokens":0') is None
