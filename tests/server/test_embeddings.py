"""/v1/embeddings through the server and the official client."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from shardline.config.engine import EngineConfig
from tests.server.conftest import Running, serve


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serve(engine_config=EngineConfig.from_options(runner="pooling")) as running:
        yield running


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_vectors_are_normalized(http: httpx.Client, client: openai.OpenAI, encoding: str) -> None:
    answer = client.embeddings.create(model="demo", input=["a", "bc"])  # the client asks for base64 and decodes it
    assert [item.index for item in answer.data] == [0, 1]
    for item in answer.data:
        assert item.embedding == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    raw = http.post("/v1/embeddings", json={"input": [5, 6], "encoding_format": encoding}).json()
    assert isinstance(raw["data"][0]["embedding"], str if encoding == "base64" else list)
    assert raw["usage"]["prompt_tokens"] == 2


def test_dimensions(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="demo", input="a", dimensions=2)
    assert answer.data[0].embedding == pytest.approx([0.6, 0.8])
    with pytest.raises(openai.BadRequestError, match=r"\[1, 3\]") as caught:
        client.embeddings.create(model="demo", input="a", dimensions=4)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimension": 2}, "dimension"),
    ],
)
def test_refuses_with_the_field(http: httpx.Client, change: dict[str, object], param: str) -> None:
    answer = http.post("/v1/embeddings", json={"input": "a", **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_a_server_that_embeds_does_not_generate(http: httpx.Client, path: str) -> None:
    answer = http.post(f"/v1/{path}", json={"prompt": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_a_server_that_generates_does_not_embed() -> None:
    with serve() as running, running.openai() as client:
        with pytest.raises(openai.BadRequestError, match="--runner pooling") as caught:
            client.embeddings.create(model="demo", input="a")
        assert caught.value.code == "unsupported_parameter"
