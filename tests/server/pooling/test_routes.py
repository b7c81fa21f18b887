"""/pooling and /classify."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator

import httpx
import pytest

from shardline.checkpoints.classifier import LabelConfig
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from tests.server.conftest import Running, serve

POOLING = EngineConfig.from_options(runner="pooling")
UNIT = [3 / 13, 4 / 13, 12 / 13]
"""The fake engine's vector, of length 1."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serve(engine_config=POOLING) as running:
        yield running


@pytest.fixture(scope="module")
def classifier() -> Iterator[httpx.Client]:
    """A model with three labels; the fake engine's logits are 3, 4 and 12."""
    labels = LabelConfig(("low", "middle", "high"), "softmax")
    with serve(engine_config=POOLING, labels=labels) as running, running.http() as client:
        yield client


def test_pooling_of_prompts(http: httpx.Client) -> None:
    answer = http.post("/pooling", json={"model": "demo", "input": ["a", "bc"]}).json()
    assert answer["id"].startswith("pooling-")
    assert answer["object"] == "list"
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "pooling"), (1, "pooling")]
    assert answer["data"][1]["data"] == pytest.approx(UNIT)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 2
    raw = http.post("/pooling", json={"input": "a", "use_activation": False, "dimensions": 2}).json()
    assert raw["data"][0]["data"] == [3.0, 4.0]


def test_pooling_of_every_token(http: httpx.Client) -> None:
    answer = http.post("/pooling", json={"input": [5, 6, 7], "task": "token_embed"}).json()
    assert answer["data"][0]["data"] == [pytest.approx(UNIT)] * 3


def test_pooling_of_a_conversation(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = http.post("/pooling", json={"messages": messages}).json()
    tokens = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert answer["usage"]["prompt_tokens"] == tokens["count"]


@pytest.mark.parametrize(
    ("dtype", "format"), [("float32", "f"), ("float16", "e"), ("bfloat16", None)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("order", ["little", "big"])
def test_bytes(http: httpx.Client, dtype: str, format: str | None, order: str) -> None:
    asked = {"input": [[5], [6, 7]], "embed_dtype": dtype, "endianness": order, "task": "token_embed"}
    answer = http.post("/pooling", json={**asked, "encoding_format": "bytes"})
    about = json.loads(answer.headers["metadata"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert [item["shape"] for item in about["data"]] == [[1, 3], [2, 3]]
    assert about["usage"]["prompt_tokens"] == 3
    item = about["data"][1]
    part = answer.content[item["start"] : item["end"]]
    mark = "<" if order == "little" else ">"
    if format is None:  # the upper half of float32
        words = struct.unpack(f"{mark}6H", part)
        values = [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]
    else:
        values = list(struct.unpack(f"{mark}6{format}", part))
    assert values == pytest.approx(UNIT * 2, rel=1e-2 if dtype == "bfloat16" else 1e-3)
    only = http.post("/pooling", json={**asked, "encoding_format": "bytes_only"})
    assert (only.content, "metadata" in only.headers) == (answer.content, False)
    coded = http.post("/pooling", json={**asked, "encoding_format": "base64"}).json()["data"][1]["data"]
    assert base64.b64decode(coded) == part


def test_bytes_of_a_model_whose_name_no_header_can_have() -> None:
    with serve(ServerConfig(served_model_name=("模型",)), engine_config=POOLING) as running, running.http() as client:
        answer = client.post("/pooling", json={"input": "a", "encoding_format": "bytes"})
    assert (answer.status_code, json.loads(answer.headers["metadata"])["model"]) == (200, "模型")


def test_truncation(http: httpx.Client) -> None:
    long = "a" * 2000
    answer = http.post("/pooling", json={"input": long, "truncate_prompt_tokens": 4})
    assert answer.json()["usage"]["prompt_tokens"] == 4
    assert (
        http.post("/pooling", json={"input": long, "truncate_prompt_tokens": -1}).json()["usage"]["total_tokens"] == 511
    )
    assert http.post("/pooling", json={"input": long}).status_code == 400
    answer = http.post("/pooling", json={"input": "a", "truncate_prompt_tokens": 10**6})
    assert answer.status_code == 400
    assert "select a smaller truncation size" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/pooling", {"input": "a", "task": "classify"}, "Classification API"),
        ("/classify", {"input": "a"}, "Classification API"),
        ("/pooling", {"input": "a", "messages": [{"role": "user", "content": "b"}]}, "'input' or 'messages'"),
        ("/pooling", {}, "'input' or 'messages'"),
        ("/pooling", {"input": "a", "task": "encode"}, "task"),
        ("/pooling", {"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype"),
        ("/pooling", {"input": [5] * 100, "task": "token_embed"}, "at most 200"),
    ],
)
def test_refusals(
    http: httpx.Client, path: str, body: dict[str, object], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.server.pooling.request.MOST_NUMBERS", 200)
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


def test_classification(classifier: httpx.Client) -> None:
    answer = classifier.post("/classify", json={"model": "demo", "input": ["a", "b"]}).json()
    assert answer["id"].startswith("classify-")
    powers = [math.exp(one - 12) for one in (3, 4, 12)]
    for index, item in enumerate(answer["data"]):
        assert (item["index"], item["label"], item["num_classes"]) == (index, "high", 3)
        assert item["probs"] == pytest.approx([power / sum(powers) for power in powers])
    raw = classifier.post("/classify", json={"input": "a", "use_activation": False}).json()
    assert raw["data"][0]["probs"] == [3.0, 4.0, 12.0]
    every = classifier.post(
        "/pooling", json={"input": [5, 6], "task": "token_classify", "use_activation": False}
    ).json()
    assert every["data"][0]["data"] == [[3.0, 4.0, 12.0]] * 2


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/embeddings", {"input": "a"}, "Embeddings API"),
        ("/pooling", {"input": "a", "task": "embed"}, "Embeddings API"),
        ("/pooling", {"input": "a", "dimensions": 2}, "dimensions"),
        ("/score", {"text_1": "a", "text_2": "b"}, "num_labels == 1"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "num_labels == 1"),
        ("/v1/completions", {"prompt": "a"}, "/classify"),
        ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1]}, "/classify"),
    ],
)
def test_what_a_classifier_does_not(classifier: httpx.Client, path: str, body: dict[str, object], word: str) -> None:
    answer = classifier.post(path, json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]
