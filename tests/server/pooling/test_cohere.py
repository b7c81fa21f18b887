"""/v2/embed."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from shardline.config.engine import EngineConfig
from shardline.server.errors import ApiError
from shardline.server.pooling import cohere
from tests.server.conftest import Running, serve

UNIT = [3 / 13, 4 / 13, 12 / 13]
"""The fake engine's vector, of length 1."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serve(engine_config=EngineConfig.from_options(runner="pooling")) as running:
        yield running


def test_vectors_in_several_forms(http: httpx.Client) -> None:
    body = {"model": "demo", "texts": ["a", "bc"], "embedding_types": ["float", "base64"]}
    answer = http.post("/v2/embed", json=body).json()
    assert answer["id"].startswith("embd-")
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == ["a", "bc"]
    assert answer["embeddings"]["float"] == [pytest.approx(UNIT)] * 2
    packed = base64.b64decode(answer["embeddings"]["base64"][1])
    assert struct.unpack("<3f", packed) == pytest.approx(UNIT)
    assert answer["meta"]["api_version"] == {"version": "2"}
    assert answer["meta"]["billed_units"]["input_tokens"] > 2
    assert answer["meta"]["billed_units"]["image_tokens"] == 0
    assert list(http.post("/v2/embed", json={"texts": ["a"]}).json()["embeddings"]) == ["float"]


def test_inputs_in_parts_are_conversations(http: httpx.Client) -> None:
    content = [{"type": "text", "text": "Hi"}]
    answer = http.post("/v2/embed", json={"inputs": [{"content": content}], "output_dimension": 2}).json()
    assert answer["embeddings"]["float"] == [pytest.approx([0.6, 0.8])]
    assert "texts" not in answer
    conversation = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False}
    assert answer["meta"]["billed_units"]["input_tokens"] == http.post("/tokenize", json=conversation).json()["count"]


def test_signs_of_vectors() -> None:
    vectors = [np.array([1, -1, 1, -1, 1, -1, 1, 0], np.float32)]
    assert cohere._write(vectors, "ubinary") == [[0b10101011]]
    assert cohere._write(vectors, "binary") == [[0b10101011 - 128]]
    with pytest.raises(ApiError, match="8 must divide"):
        cohere._write([vectors[0][:3]], "binary")


@pytest.mark.parametrize(("truncate", "count"), [("END", 4), ("START", 4), ("NONE", None)])
def test_truncation(http: httpx.Client, truncate: str, count: int | None) -> None:
    answer = http.post("/v2/embed", json={"texts": ["a b c d e f g h"], "truncate": truncate, "max_tokens": 4})
    if count is None:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"
    else:
        assert answer.json()["meta"]["billed_units"]["input_tokens"] == count


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
        ({"images": ["data:"]}, "images"),
        ({"texts": ["a"], "input_type": "query"}, "input_type"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
        ({"texts": ["a"], "embedding_types": ["binary"]}, "embedding_types"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "messages"),
    ],
)
def test_refuses_with_the_field(http: httpx.Client, body: dict[str, object], param: str) -> None:
    answer = http.post("/v2/embed", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
