"""Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shardline.config.server import ServerConfig
from shardline.server.anthropic import routes
from tests.server.conftest import Running, serve
from tests.server.fake_engine import REPLY
from tests.server.test_tools import TEMPLATE
from tests.text.builders import byte_level_json, tokenizer

TOKENIZER = tokenizer(byte_level_json())
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "find", "description": "Find", "input_schema": {"properties": {"q": {"type": "string"}}}}


def events_of(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
        lines = list(answer.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == names
    return events


def prompt_of(running: Running) -> str:
    return TOKENIZER.decode(running.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_answers_a_conversation(shared: Running, http: httpx.Client) -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}]
    body = {"max_tokens": 100, "messages": HI, "system": system, "metadata": {"user_id": "u"}, "betas": ["x"]}
    answer = http.post("/v1/messages", json=body).json()
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "end_turn")
    assert answer["content"] == [{"type": "text", "text": REPLY}]
    assert answer["id"].startswith("msg_")
    assert prompt_of(shared) == "<|bos|><|system|>Be brief.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>"
    usage = answer["usage"]
    parts = usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]
    assert sum(parts) == len(shared.engine.requests[-1].prompt_token_ids)


def test_a_stream_has_the_events_of_the_whole_answer(http: httpx.Client) -> None:
    events = events_of(http, {"max_tokens": 100, "messages": HI})
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == REPLY
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert start["output_tokens"] == 0
    cached = end["cache_creation_input_tokens"] + end["cache_read_input_tokens"]
    assert start["input_tokens"] == end["input_tokens"] + cached


@pytest.mark.parametrize(
    ("change", "reason", "sequence"),
    [({"max_tokens": 2}, "max_tokens", None), ({"stop_sequences": ["w"]}, "stop_sequence", "w")],
)
def test_says_why_it_stops(http: httpx.Client, change: dict[str, Any], reason: str, sequence: str | None) -> None:
    answer = http.post("/v1/messages", json={"max_tokens": 100, "messages": HI, **change}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_calls_and_their_results() -> None:
    with serve(ServerConfig(port=0, chat_template=TEMPLATE)) as running, running.http() as http:
        running.engine.reply = 'Wait.\n<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>'
        body: dict[str, Any] = {"max_tokens": 200, "messages": HI, "tools": [TOOL]}
        answer = http.post("/v1/messages", json=body).json()
        assert answer["stop_reason"] == "tool_use"
        text, call = answer["content"]
        assert text["text"].strip() == "Wait."
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "find", {"q": "x"})
        events = events_of(http, body)
        pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert json.loads("".join(piece.get("partial_json", "") for piece in pieces)) == {"q": "x"}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "found"}]}
        more = [*HI, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        assert http.post("/v1/messages", json={**body, "messages": more}).status_code == 200
        assert "found" in prompt_of(running)


def test_thinking_is_a_block_of_its_own() -> None:
    with serve(ServerConfig(port=0, reasoning_parser="qwen3")) as running, running.http() as http:
        running.engine.reply = "<think>\nHm.</think>\n\nYes."
        body = {"max_tokens": 200, "messages": HI, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        answer = http.post("/v1/messages", json=body).json()
        kinds = [block["type"] for block in answer["content"]]
        assert kinds == ["thinking", "text"]
        assert answer["content"][0]["thinking"].strip() == "Hm."
        again = [*HI, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "And?"}]
        assert http.post("/v1/messages", json={**body, "messages": again}).status_code == 200


def test_effort_and_budget_of_thinking() -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = ServerConfig(port=0, reasoning_parser="qwen3", chat_template=template)
    with serve(config) as running, running.http() as http:
        body = {"max_tokens": 9, "messages": HI, "output_config": {"effort": "low"}}
        thinking = {"type": "enabled", "budget_tokens": 4}
        assert http.post("/v1/messages", json={**body, "thinking": thinking}).status_code == 200
        assert prompt_of(running).startswith("low True")
        assert http.post("/v1/messages", json={**body, "output_config": {"effort": "much"}}).status_code == 400


def test_a_schema_constrains_the_answer(shared: Running, http: httpx.Client) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form, "output_config": {"effort": "low"}}):
        body = {"max_tokens": 9, "messages": HI, **fields}
        assert http.post("/v1/messages", json=body).status_code == 200
        assert shared.engine.requests[-1].constraints is not None


def test_counts_and_renders_what_it_would_run(shared: Running, http: httpx.Client) -> None:
    body = {"max_tokens": 5, "messages": [*HI, {"role": "system", "content": "Hurry."}, *HI]}
    http.post("/v1/messages", json=body)
    ids = shared.engine.requests[-1].prompt_token_ids
    assert http.post("/v1/messages/count_tokens", json={"messages": body["messages"]}).json() == {
        "input_tokens": len(ids)
    }
    assert http.post("/v1/messages/render", json=body).json()["token_ids"] == ids


@pytest.mark.parametrize(
    ("change", "status", "kind", "part"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "text only"),
        ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, 400, "invalid_request_error", "input_schema"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            400,
            "invalid_request_error",
            "'messages[0].content[0].tool_use_id'",
        ),
        ({"messages": [{"role": "user", "content": [{}]}]}, 400, "invalid_request_error", "Missing required parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_request_error", "[0].text"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "'tool_choice.name'"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "client runs"),
    ],
)
def test_errors_have_anthropics_shape(
    http: httpx.Client, change: dict[str, Any], status: int, kind: str, part: str
) -> None:
    answer = http.post("/v1/messages", json={"max_tokens": 5, "messages": HI, **change})
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert part in error["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("GET", "/v1/messages", b"", 405, "api_error"),
        ("GET", "/v1/messages/nothing", b"", 404, "not_found_error"),
        ("POST", "/v1/messages", b"x" * 2001, 413, "request_too_large"),
        ("POST", "/v1/messages", b"", 401, "authentication_error"),
        ("POST", "/v1/messages/count_tokens", b"{}", 500, "api_error"),
    ],
)
def test_errors_outside_the_handlers_have_anthropics_shape(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, content: bytes, status: int, kind: str
) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(routes, "_encode", crash)
    config = ServerConfig(port=0, api_key=("secret",), max_request_bytes=2000)
    with serve(config) as running, running.http() as http:
        key = {} if status == 401 else {"x-api-key": "secret"}
        body = b'{"messages": [{"role": "user", "content": "Hi"}]}' if status == 500 else content
        answer = http.request(method, path, content=body, headers={"content-type": "application/json", **key})
    assert answer.status_code == status, answer.text
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)


def test_takes_the_key_in_anthropics_header() -> None:
    with serve(ServerConfig(port=0, api_key=("secret",))) as running, running.http() as http:
        body = {"max_tokens": 5, "messages": HI}
        assert http.post("/v1/messages", json=body, headers={"x-api-key": "wrong"}).status_code == 401
        assert http.post("/v1/messages", json=body, headers={"x-api-key": "secret"}).status_code == 200
