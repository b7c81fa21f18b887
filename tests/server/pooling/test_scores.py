"""/score and /rerank."""

from __future__ import annotations

import math
from collections.abc import Iterator

import httpx
import pytest

from shardline.checkpoints.classifier import LabelConfig
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from tests.server.conftest import Running, serve

POOLING = EngineConfig.from_options(runner="pooling")
ONE_LABEL = LabelConfig(("LABEL_0",), "sigmoid")
PAIR_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ instruction or '' }}"
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serve(engine_config=POOLING) as running:
        yield running


@pytest.fixture(scope="module")
def reranker() -> Iterator[Running]:
    """A classifier of one label; the fake engine's logit is 3."""
    with serve(engine_config=POOLING, labels=ONE_LABEL) as running:
        yield running


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_embeddings_are_compared(http: httpx.Client, path: str, names: tuple[str, str]) -> None:
    answer = http.post(path, json={"model": "demo", names[0]: "ab", names[1]: ["c", "d"]}).json()
    assert answer["id"].startswith("score-")
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "score"), (1, "score")]
    assert [item["score"] for item in answer["data"]] == pytest.approx([1.0, 1.0])
    single = http.post("/pooling", json={"input": ["ab", "c", "d"]}).json()
    assert answer["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "1:1, 1:N or N:N"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "1:1, 1:N or N:N"),
        ({"text_1": [], "text_2": ["c"]}, "At least one text element"),
        ({"text_1": "a", "text_2": []}, "At least one text_pair element"),
        ({"text_1": "a"}, "two sides"),
        ({"text_1": "a", "documents": "b"}, "two sides"),
        ({"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "text only"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_query": 512}, "less than max_model_len"),
    ],
)
def test_refusals(http: httpx.Client, body: dict[str, object], word: str) -> None:
    answer = http.post("/score", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


def test_a_classifier_reads_both_texts(reranker: Running) -> None:
    with reranker.http() as http:
        body = {"text_1": ["ab", "x"], "text_2": ["c", {"content": [{"type": "text", "text": "yz"}]}]}
        answer = http.post("/score", json=body).json()
        assert [item["score"] for item in answer["data"]] == pytest.approx([1 / (1 + math.exp(-3))] * 2)
        expected = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in ("abc", "xyz")]
        assert [request.prompt_token_ids for request in reranker.engine.requests[-2:]] == expected
        http.post(
            "/score", json={"text_1": "abcd", "text_2": "efgh", "max_tokens_per_query": 1, "max_tokens_per_doc": 2}
        )
        cut = http.post("/tokenize", json={"prompt": "aef"}).json()["tokens"]
        assert reranker.engine.requests[-1].prompt_token_ids == cut


def test_a_configured_template_writes_the_pairs() -> None:
    config = ServerConfig(port=0, chat_template=PAIR_TEMPLATE)
    with serve(config, engine_config=POOLING, labels=ONE_LABEL) as running, running.http() as http:
        body = {"query": "ab", "documents": ["c"], "instruction": "!"}
        assert http.post("/rerank", json=body).status_code == 200
        expected = http.post("/tokenize", json={"prompt": "<query>ab<document>c!"}).json()["tokens"]
        assert running.engine.requests[-1].prompt_token_ids == expected


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranking(reranker: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["one", "two", "three"]
    with reranker.http() as http:
        answer = http.post(path, json={"model": "demo", "query": "q", "documents": documents}).json()
        assert answer["id"].startswith("score-")
        assert [item["index"] for item in answer["results"]] == [0, 1, 2]  # all are equal
        assert answer["results"][1]["document"] == {"text": "two", "multi_modal": None}
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
        assert len(http.post(path, json={"query": "q", "documents": documents, "top_n": 2}).json()["results"]) == 2


def test_the_best_comes_first(http: httpx.Client, shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    by_length = {1: [1.0, 0.0, 0.0], 2: [0.0, 1.0, 0.0], 3: [1.0, 1.0, 0.0]}
    step = shared.engine._step

    def answer_by_length(request, ids):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(shared.engine, "embedding", by_length[len(request.prompt_token_ids)])
        return step(request, ids)

    monkeypatch.setattr(shared.engine, "_step", answer_by_length)
    body = {"query": "a", "documents": ["ab", "b", "abc"]}
    results = http.post("/rerank", json=body).json()["results"]
    assert [item["index"] for item in results] == [1, 2, 0]
    assert [item["relevance_score"] for item in results] == pytest.approx([1.0, 0.5**0.5, 0.0])
