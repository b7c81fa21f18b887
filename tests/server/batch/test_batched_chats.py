"""/v1/chat/completions/batch."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, serve, wait_until

PATH = "/v1/chat/completions/batch"


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_one_choice_for_each_conversation(http: httpx.Client) -> None:
    single = http.post("/v1/chat/completions", json={"messages": chat("a"), "seed": 1}).json()
    body = http.post(PATH, json={"messages": [chat("a"), chat("b"), chat("c")], "seed": 1}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {single["choices"][0]["message"]["content"]}
    assert body["object"] == "chat.completion"
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][name] == 3 * single["usage"][name]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_several_choices_each(http: httpx.Client) -> None:
    body = http.post(PATH, json={"messages": [chat("a"), chat("b")], "n": 2}).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[2] != texts[1] == texts[3]


@pytest.mark.parametrize("as_ids", [False, True])
def test_log_probabilities(http: httpx.Client, as_ids: bool) -> None:
    options = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": as_ids, "return_token_ids": True}
    body = http.post(PATH, json={"messages": [chat("a")], **options}).json()
    tokens = [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]]
    assert tokens
    assert all(token.startswith("token_id:") is as_ids for token in tokens)
    assert body["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params.prompt_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": chat("a")}, "messages"),
        ({"messages": [chat("a")] * 1025}, "messages"),
        ({"messages": [chat("a")] * 1024, "n": 3}, "messages"),
        ({"messages": [chat("a"), [{"role": "user"}]]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"model": "other"}, "model"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_bad_requests(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(PATH, json={"messages": [chat("a")], **fields})
    assert answer.status_code == (404 if param == "model" else 400)
    assert param in answer.json()["error"]["param"]


def test_a_conversation_that_is_too_long_stops_all(shared: Running, http: httpx.Client) -> None:
    answer = http.post(PATH, json={"messages": [chat("a"), chat("b " * 600)]})
    assert answer.status_code == 400
    assert "context length" in answer.json()["error"]["message"]
    wait_until(lambda: shared.engine.num_running() == 0)


@pytest.mark.slow
def test_a_client_that_leaves_ends_all() -> None:
    with serve() as running, running.http() as http:
        running.engine.paused = True
        with pytest.raises(httpx.ReadTimeout):
            http.post(PATH, json={"messages": [chat("a"), chat("b")]}, timeout=0.5)
        wait_until(lambda: len(running.engine.aborted) == 2)
