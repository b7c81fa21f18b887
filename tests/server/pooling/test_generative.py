"""/generative_scoring, and what a server that generates does not do."""

from __future__ import annotations

import math

import httpx
import pytest

from tests.server.conftest import Running

BODY = {"query": "Is it? ", "items": ["yes", "no", "perhaps"], "label_token_ids": [5, 6]}


def test_scores(http: httpx.Client, shared: Running) -> None:
    answer = http.post("/generative_scoring", json={"model": "demo", **BODY}).json()
    assert answer["id"].startswith("generative-scoring-")
    assert answer["object"] == "list"
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    assert [item["score"] for item in answer["data"]] == [0.5] * 3  # the fake engine finds both equally likely
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    asked = shared.engine.requests[-3:]
    assert [request.sampling.logprob_token_ids for request in asked] == [[5, 6]] * 3
    query = http.post("/tokenize", json={"prompt": "Is it? "}).json()["tokens"]
    item = http.post("/tokenize", json={"prompt": "no", "add_special_tokens": False}).json()["tokens"]
    assert asked[1].prompt_token_ids == [*query, *item]


def test_more_labels_than_a_request_reports(http: httpx.Client, shared: Running) -> None:
    answer = http.post("/generative_scoring", json={**BODY, "label_token_ids": list(range(200))}).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx([1 / 200] * 3)
    asked = [request.sampling.logprob_token_ids or () for request in shared.engine.requests[-6:]]
    assert [len(token_ids) for token_ids in asked] == [128, 72] * 3


def test_probabilities_among_all_tokens(http: httpx.Client) -> None:
    answer = http.post("/generative_scoring", json={**BODY, "apply_softmax": False}).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx([math.exp(-0.5)] * 3)


def test_items_first_and_token_ids(http: httpx.Client, shared: Running) -> None:
    body = {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [5], "item_first": True}
    assert http.post("/generative_scoring", json=body).status_code == 200
    assert [request.prompt_token_ids for request in shared.engine.requests[-2:]] == [[7, 5, 6], [8, 9, 5, 6]]
    long = {"query": [5] * 600, "items": [[7]], "label_token_ids": [5]}
    assert http.post("/generative_scoring", json=long).json()["usage"]["prompt_tokens"] == 511


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"items": []}, "at least one item"),
        ({"label_token_ids": []}, "at least one token ID"),
        ({"label_token_ids": [9999999999]}, "out of vocabulary range"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"items": ["a", [5]]}, "items"),
        ({"items": ["a"] * 2049}, "at most 2048"),
    ],
)
def test_refusals(http: httpx.Client, change: dict[str, object], word: str) -> None:
    answer = http.post("/generative_scoring", json={**BODY, **change})
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"]
)
def test_a_server_that_generates_does_not_pool(path: str, http: httpx.Client) -> None:
    answer = http.post(path, json={"input": "a", "text_1": "a", "text_2": "b", "query": "a", "documents": ["b"]})
    assert answer.status_code == 400
    assert "--runner pooling" in answer.json()["error"]["message"]
