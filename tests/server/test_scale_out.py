"""Rendered requests, and token ids in and out."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from typing import Any

import httpx
import numpy as np
import pytest

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from tests.server.conftest import Running, serve
from tests.server.fake_engine import REPLY
from tests.text.builders import byte_level_json, tokenizer

TOKENIZER = tokenizer(byte_level_json())
GENERATE = "/inference/v1/generate"
HI = [{"role": "user", "content": "Hi"}]


def stream(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", GENERATE, json={**body, "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_rendered_chat_gives_the_same_answer_as_the_chat(http: httpx.Client) -> None:
    body = {"messages": HI, "temperature": 0.25, "seed": 3, "logit_bias": {"7": 2}, "return_token_ids": True}
    chat = http.post("/v1/chat/completions", json=body).json()
    rendered = http.post("/v1/chat/completions/render", json=body).json()
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    assert rendered["sampling_params"]["temperature"] == 0.25
    assert rendered["request_id"].startswith("chatcmpl-")
    generated = http.post(GENERATE, json=rendered).json()
    assert generated["request_id"] == "generate-tokens-" + rendered["request_id"]
    assert generated["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert generated["usage"] == chat["usage"]


def test_a_rendered_schema_is_the_grammar_of_the_chat(shared: Running, http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": HI, "response_format": form}
    http.post("/v1/chat/completions", json=body)
    constraints = shared.engine.requests[-1].constraints
    rendered = http.post("/v1/chat/completions/render", json=body).json()
    assert http.post(GENERATE, json=rendered).status_code == 200
    assert constraints is not None
    assert shared.engine.requests[-1].constraints == constraints


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("chat/completions", {"messages": HI}, "chatcmpl-"),
        ("completions", {"prompt": "Hi"}, "cmpl-"),
        ("completions", {"prompt": ["Hi", "you"]}, "cmpl-"),
        ("responses", {"input": "Hi"}, "resp_"),
    ],
)
def test_renders_what_each_endpoint_would_run(
    shared: Running, http: httpx.Client, path: str, body: dict[str, Any], prefix: str
) -> None:
    before = len(shared.engine.requests)
    answer = http.post(f"/v1/{path}/render", json=body)
    assert answer.status_code == 200, answer.text
    rendered = answer.json() if isinstance(answer.json(), list) else [answer.json()]
    assert len(shared.engine.requests) == before
    http.post(f"/v1/{path}", json=body)
    ran = [request.prompt_token_ids for request in shared.engine.requests[before:]]
    assert [one["token_ids"] for one in rendered] == ran
    assert all(one["request_id"].startswith(prefix) for one in rendered)


def test_ids_come_from_the_header_or_the_body(http: httpx.Client) -> None:
    body = {"prompt": ["Hi", "you"], "request_id": "abc"}
    assert [r["request_id"] for r in http.post("/v1/completions/render", json=body).json()] == [
        "cmpl-abc-0",
        "cmpl-abc-1",
    ]
    headers = {"X-Request-Id": "hdr"}
    answer = http.post("/v1/chat/completions/render", json={"messages": HI, "request_id": "abc"}, headers=headers)
    assert answer.json()["request_id"] == "chatcmpl-hdr"


def test_offsets_stand_where_the_tokens_do(http: httpx.Client) -> None:
    text = "Hello, wörld 🙂!"
    body = {"prompt": text, "return_token_offsets": True, "add_special_tokens": False}
    [whole] = http.post("/v1/completions/render", json=body).json()
    pieces = [text[start:end] for start, end in whole["token_offsets"]]
    for token_id, piece in zip(whole["token_ids"], pieces, strict=True):
        decoded = TOKENIZER.decode([token_id])
        assert "\ufffd" in decoded or piece == decoded
    [cut] = http.post("/v1/completions/render", json={**body, "truncate_prompt_tokens": 3}).json()
    assert cut["token_offsets"] == whole["token_offsets"][-3:]
    right = {**body, "truncate_prompt_tokens": 3, "truncation_side": "right"}
    assert http.post("/v1/completions/render", json=right).json()[0]["token_ids"] == whole["token_ids"][:3]
    assert http.post("/v1/completions/render", json={"prompt": text}).json()[0]["token_offsets"] is None


def test_text_mode_and_streams_have_the_same_answer(http: httpx.Client) -> None:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"n": 2, "logprobs": 1}, "output_mode": "text"}
    whole = http.post(GENERATE, json=body).json()
    assert [choice["text"] for choice in whole["choices"]] == [REPLY, "1" + REPLY]
    content = whole["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content if not entry["token"].startswith("bytes:"))
    chunks = stream(http, body)
    for index in range(2):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == whole["choices"][index]["text"]
        token_ids = [token_id for part in parts for token_id in part["token_ids"]]
        assert token_ids == whole["choices"][index]["token_ids"]
        assert parts[-1]["finish_reason"] == "stop"


def test_logprobs_have_ids_and_ranks(http: httpx.Client) -> None:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1}}
    answer = http.post(GENERATE, json=body).json()
    [choice] = answer["choices"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token_id"] == choice["token_ids"][0]
    assert len(answer["prompt_logprobs"]) == 3


def test_tokens_that_a_request_names_are_scored_in_its_prompt(shared: Running, http: httpx.Client) -> None:
    rows = {"prompt_logprob_token_ids": [[33], [44, 100], [-1], [55, -1]], "prompt_logprob_start": 1}
    body = {"token_ids": [11, 22, 33, 44, 9, 55], "sampling_params": {"max_tokens": 2, "prompt_logprobs": 0, **rows}}
    answer = http.post(GENERATE, json=body).json()
    scores = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    assert scores.dtype == np.float32
    none = -np.inf  # the fake engine finds all tokens equally likely
    assert scores.tolist() == [[-0.5, none], [-0.5, -0.5], [none, none], [-0.5, none]]
    asked = shared.engine.requests[-3:]
    assert [request.prompt_token_ids for request in asked] == [[11, 22], [11, 22, 33], [11, 22, 33, 44, 9]]
    assert [request.sampling.logprob_token_ids for request in asked] == [[33], [44, 100], [55]]
    assert (
        http.post(GENERATE, json={"token_ids": [5], "sampling_params": {}}).json()["prompt_token_id_logprobs"] is None
    )


@pytest.mark.parametrize(
    ("params", "part"),
    [
        ({"prompt_logprob_token_ids": [[5]]}, "1 rows, but the prompt has 2 scored rows"),
        ({"prompt_logprob_token_ids": [[5], []], "prompt_logprob_start": -1}, "scored rows"),
        ({"prompt_logprob_token_ids": [[], []]}, "1 to 128 tokens"),
        ({"prompt_logprob_token_ids": [[5], [-2]]}, "-1 as padding"),
        ({"prompt_logprob_token_ids": [list(range(21)), [5]]}, "max allowed: 20"),
        ({"prompt_logprob_token_ids": "a"}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_start": 1}, "requires prompt_logprob_token_ids"),
    ],
)
def test_rows_of_named_tokens_are_checked(http: httpx.Client, params: dict[str, Any], part: str) -> None:
    answer = http.post(GENERATE, json={"token_ids": [5, 6, 7], "sampling_params": params})
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "out of vocabulary"),
        ({"sampling_params": {"min_tokens": 1 << 30}}, "min_tokens"),
        ({"sampling_params": {"stop": ["x"], "detokenize": False}}, "stop strings"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "detokenize"),
        ({"sampling_params": {"prompt_logprob_token_ids": [[1]]}, "stream": True}, "stream=true"),
        ({"output_mode": "derender"}, "output_mode"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"sampling_params": {"structured_outputs": {"grammar": '{"grammars": 5}'}}}, "structured_outputs"),
    ],
)
def test_refuses_with_a_reason(http: httpx.Client, change: dict[str, Any], part: str) -> None:
    answer = http.post(GENERATE, json={"token_ids": [1], "sampling_params": {}, **change})
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "change", "part"),
    [
        ("messages", {"max_tokens": 4, "seed": 10**350}, "seed"),
        ("chat/completions", {"priority": 10**30}, "priority"),
        ("chat/completions", {"min_tokens": 1 << 30}, "min_tokens"),
        ("chat/completions", {"cache_salt": "a" * 1025}, "cache_salt"),
    ],
)
def test_what_an_engine_would_refuse_is_not_rendered(
    http: httpx.Client, path: str, change: dict[str, Any], part: str
) -> None:
    for endpoint in (f"/v1/{path}/render", f"/v1/{path}"):
        answer = http.post(endpoint, json={"messages": HI, **change})
        assert answer.status_code == 400, answer.text
        assert part in answer.json()["error"]["message"]


def test_a_rendered_number_beyond_64_bits(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 4, "top_k": 10**30}
    rendered = http.post("/v1/messages/render", json=body)
    assert (rendered.status_code, rendered.json()["sampling_params"].get("top_k", 0)) == (200, 0)


def test_a_rendered_request_continues_no_response(http: httpx.Client) -> None:
    answer = http.post("/v1/responses/render", json={"input": "Hi", "previous_response_id": "resp_1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")


def test_an_aborted_stream_says_so(shared: Running, http: httpx.Client) -> None:
    shared.engine.paused = True
    try:
        chunks: list[dict[str, Any]] = []
        body = {"token_ids": [1, 2], "sampling_params": {}, "request_id": "mine"}
        reader = threading.Thread(target=lambda: chunks.extend(stream(http, body)))
        reader.start()
        while "generate-tokens-mine-0" not in {request.request_id for request in shared.engine.requests}:
            time.sleep(0.01)
        ids = ["generate-tokens-mine", "generate-tokens-unknown"]
        assert http.post("/inference/v1/abort_requests", json={"request_ids": ids}).status_code == 200
        reader.join(5)
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    finally:
        shared.engine.resume()
    assert http.post("/inference/v1/abort_requests", json={}).status_code == 400


def test_a_server_of_tokens_only_has_no_tokenizer() -> None:
    config = ServerConfig(tokens_only=True)
    engine_config = EngineConfig.from_options(skip_tokenizer_init=True)
    with serve(config, engine_config=engine_config) as running, running.http() as http:
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
        answer = http.post("/inference/v1/generate", json=body)
        assert len(answer.json()["choices"][0]["token_ids"]) == 2
        refused = http.post("/inference/v1/generate", json={**body, "output_mode": "text"})
        assert "requires a tokenizer" in refused.json()["error"]["message"]
        refused = http.post("/inference/v1/generate", json={**body, "sampling_params": {"stop": ["x"]}})
        assert "stop strings" in refused.json()["error"]["message"]
        assert http.post("/abort_requests", json={"request_ids": ["generate-tokens-x"]}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": [5]}).status_code == 404


def test_a_server_that_renders_has_no_other_endpoint_of_a_model() -> None:
    with serve(ServerConfig(render_only=True)) as running, running.http() as http:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        rendered = http.post("/v1/chat/completions/render", json=chat).json()
        assert rendered["token_ids"] == http.post("/tokenize", json=chat).json()["tokens"]
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate", "/score"):
            assert http.post(path, json=chat).status_code == 404
        assert http.get("/").status_code == 404
        assert http.get("/health").status_code == 200
