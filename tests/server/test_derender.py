"""Answers in tokens, as the endpoints that rendered their requests would have written them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shardline.config.server import ServerConfig
from tests.server.conftest import Running, serve
from tests.text.builders import byte_level_json, tokenizer

TOKENIZER = tokenizer(byte_level_json())
GENERATE = "/inference/v1/generate"
HI = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two of the same request."""
    return {name: value for name, value in answer.items() if name not in ("id", "created", "metrics")}


def chunks(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", GENERATE, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}, {"stop": ["o"]}])
def test_a_chat_in_three_steps_is_the_chat(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"messages": HI, "temperature": 0, "seed": 3, **fields}
    chat = http.post(CHAT, json=body).json()
    rendered = http.post(f"{CHAT}/render", json=body).json()
    answer = http.post(GENERATE, json=rendered).json()
    asked = {"generate_response": answer, "chat_request": body, "prompt_token_ids": rendered["token_ids"]}
    derendered = http.post(f"{CHAT}/derender", json=asked)
    assert derendered.status_code == 200, derendered.text
    assert same(derendered.json()) == same(chat)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}])
def test_completions_in_three_steps_are_the_completions(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"prompt": ["Hi", "you"], "temperature": 0, **fields}
    completion = http.post(COMPLETION, json=body).json()
    rendered = http.post(f"{COMPLETION}/render", json=body).json()
    answers = [http.post(GENERATE, json=one).json() for one in rendered]
    prompts = [one["token_ids"] for one in rendered]
    asked = {"generate_responses": answers, "completion_request": body, "prompt_token_ids": prompts}
    derendered = http.post(f"{COMPLETION}/derender", json=asked)
    assert derendered.status_code == 200, derendered.text
    assert same(derendered.json()) == same(completion)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_chunks_of_a_stream_are_the_whole(http: httpx.Client, path: str) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "Hi", "logprobs": 1}
    whole = http.post(path, json=body).json()["choices"][0]
    rendered = http.post(f"{path}/render", json=body).json()
    rendered = rendered if path == CHAT else rendered[0]
    state: dict[str, Any] = {}
    parts = []
    request = {
        "chat_request" if path == CHAT else "completion_request": body,
        "prompt_token_ids": rendered["token_ids"],
    }
    for chunk in chunks(http, {**rendered, "stream_options": {"include_usage": True}}):
        asked = {"stream": True, "generate_chunk": chunk, "stream_state": state or None, **request}
        answer = http.post(f"{path}/derender", json=asked)
        assert answer.status_code == 200, answer.text
        state = answer.json()["stream_state"]
        parts.append(answer.json()["chunk"])
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == len(state["output_token_ids"]) > 1
    choices = [part["choices"][0] for part in parts[:-1]]
    assert len(choices) > 1
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    if path == CHAT:
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        for name in ("tokens", "text_offset", "token_logprobs"):
            assert [value for choice in choices for value in choice["logprobs"][name]] == whole["logprobs"][name]


@pytest.fixture(scope="module")
def parsing() -> Iterator[Running]:
    """A server whose answers have calls and reasoning."""
    with serve(ServerConfig(port=0, tool_call_parser="hermes", reasoning_parser="qwen3")) as running:
        yield running


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PARSED = '<think>so</think>Well. <tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


def test_calls_and_reasoning_are_found_in_every_chunk(parsing: Running) -> None:
    ids = TOKENIZER.encode_text(PARSED)
    request = {"messages": HI, "tools": TOOLS}
    with parsing.http() as http:
        prompt = http.post(f"{CHAT}/render", json=request).json()["token_ids"]
        common = {"chat_request": request, "prompt_token_ids": prompt}
        end = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
        whole = http.post(
            f"{CHAT}/derender", json={**common, "generate_response": {"request_id": "a", "choices": [end]}}
        )
        choice = whole.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning"] == "so"
        assert choice["message"]["content"].strip() == "Well."
        state: dict[str, Any] | None = None
        reasoning = content = name = arguments = ""
        for place in range(0, len(ids), 5):
            last = place + 5 >= len(ids)
            part = {"index": 1, "token_ids": ids[place : place + 5], "finish_reason": "stop" if last else None}
            asked = {"stream": True, "generate_chunk": {"request_id": "a", "choices": [part]}, "stream_state": state}
            answer = http.post(f"{CHAT}/derender", json={**common, **asked}).json()
            state, delta = answer["stream_state"], answer["chunk"]["choices"][0]["delta"]
            assert answer["chunk"]["choices"][0]["index"] == 1
            reasoning += delta.get("reasoning") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                name += call["function"].get("name") or ""
                arguments += call["function"]["arguments"]
    call = choice["message"]["tool_calls"][0]["function"]
    assert (reasoning, content, name, arguments) == ("so", choice["message"]["content"], "f", call["arguments"])
    assert json.loads(arguments) == {"a": "é"}
    assert answer["chunk"]["choices"][0]["finish_reason"] == "tool_calls"


def answer_of(*ids: int, **fields: Any) -> dict[str, Any]:
    return {"request_id": "a", "choices": [{"index": 0, "token_ids": list(ids), **fields}]}


def test_without_a_request_the_text_is_the_content(http: httpx.Client) -> None:
    passed = {"kv_transfer_params": {"a": 1}, "prompt_logprobs": [None], "metrics": {"time_to_first_token_ms": 1.5}}
    body = {"generate_response": {**answer_of(*TOKENIZER.encode_text("Hi you")), **passed}, "prompt_tokens": 7}
    answer = http.post(f"{CHAT}/derender", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "Hi you"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["total_tokens"] == 7 + len(TOKENIZER.encode_text("Hi you"))
    assert {name: answer[name] for name in passed} == passed


SCORE = {"token_id": 1, "logprob": -1.0, "rank": 1}


def test_scores_may_be_missing(http: httpx.Client) -> None:
    answers = [answer_of(1, logprobs={"content": [SCORE]}), answer_of(1)]
    answer = http.post(f"{COMPLETION}/derender", json={"generate_responses": answers}).json()
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[-1.0], [0.0]]
    fewer = answer_of(5, 6, 7, logprobs={"content": [SCORE | {"token_id": 5}]})
    answer = http.post(f"{COMPLETION}/derender", json={"generate_responses": [fewer]}).json()
    assert {len(values) for values in answer["choices"][0]["logprobs"].values() if values} == {1}
    answer = http.post(f"{CHAT}/derender", json={"generate_response": fewer}).json()
    assert [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] == [-1.0]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {}, "Missing required parameter: 'generate_response'"),
        (CHAT, {"generate_response": answer_of()}, "choice 0 has no token_ids"),
        (CHAT, {"generate_response": answer_of(1, 2**31)}, "choice 0 must be from 0 to"),
        (CHAT, {"generate_response": answer_of(-1)}, "choice 0 must be from 0 to"),
        (CHAT, {"generate_response": answer_of(*[1] * 9000)}, "more than max_model_len"),
        (CHAT, {"generate_response": answer_of(1), "prompt_token_ids": [1] * 9000}, "more than max_model_len"),
        (CHAT, {"generate_response": answer_of(1, logprobs={"content": [SCORE] * 2})}, "exceeds that of token_ids (1)"),
        (
            CHAT,
            {"generate_response": answer_of(1, logprobs={"content": [{**SCORE, "top_logprobs": [SCORE] * 30}]})},
            "top_logprobs count (30) of choice 0 exceeds max_logprobs (20)",
        ),
        (CHAT, {"generate_response": answer_of(1), "model": "other"}, "The model `other` does not exist"),
        (CHAT, {"generate_response": {**answer_of(1), "choices": []}}, "at least 1 item"),
        (COMPLETION, {"generate_responses": [{**answer_of(1), "choices": []}]}, "at least 1 item"),
        (CHAT, {"stream": True}, "'stream' needs 'generate_chunk'"),
        (
            CHAT,
            {"stream": True, "generate_chunk": {"request_id": "a", "choices": answer_of(1)["choices"] * 2}},
            "at most one choice",
        ),
        (
            CHAT,
            {"stream": True, "generate_chunk": answer_of(1), "stream_state": {"output_token_ids": [1]}},
            "invalid stream_state",
        ),
        (CHAT, {"generate_response": {**answer_of(1), "usage": {"prompt_tokens": "1"}}}, "usage"),
        (COMPLETION, {"generate_responses": []}, "generate_responses"),
        (COMPLETION, {"generate_responses": [answer_of(1)], "prompt_tokens": [1, 2]}, "prompt_tokens length (2)"),
        (COMPLETION, {"generate_responses": [answer_of(1)], "prompt_token_ids": [[1], [2]]}, "prompt_token_ids length"),
    ],
)
def test_refuses_with_a_reason(http: httpx.Client, path: str, body: dict[str, Any], message: str) -> None:
    answer = http.post(f"{path}/derender", json=body)
    assert answer.status_code == (404 if "model" in body else 400), answer.text
    assert message in answer.json()["error"]["message"]


def test_parsed_answers_need_their_request(parsing: Running) -> None:
    with parsing.http() as http:
        answer = http.post(f"{CHAT}/derender", json={"generate_response": answer_of(1)})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_request"
        body = {"stream": True, "generate_chunk": answer_of(1), "chat_request": {"messages": HI}}
        assert http.post(f"{CHAT}/derender", json=body).json()["error"]["param"] == "prompt_token_ids"
