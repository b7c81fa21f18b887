"""Prompts that are tensors, in completions and in chats."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping

import httpx
import numpy as np
import pytest
import torch

from shardline.config.engine import EngineConfig
from shardline.messages.request import Request
from tests.server.conftest import Running, serve

TENSOR = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def encoded(tensor: torch.Tensor) -> str:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture(scope="module")
def embedding() -> Iterator[Running]:
    """A server that takes tensors of 3 columns."""
    with serve(engine_config=EngineConfig.from_options(enable_prompt_embeds=True)) as running:
        yield running


def ask(running: Running, path: str, body: Mapping[str, object]) -> tuple[httpx.Response, list[Request]]:
    """The answer, and what the engine got."""
    before = len(running.engine.requests)
    with running.http() as http:
        answer = http.post(path, json={"max_tokens": 3, **body})
    return answer, running.engine.requests[before:]


def rows(request: Request) -> list[list[float]]:
    assert request.embeds is not None
    numbers: list[list[float]] = np.frombuffer(request.embeds.rows, np.float32).reshape(-1, 3).tolist()
    return numbers


def test_tensors_come_before_texts(embedding: Running) -> None:
    body: dict[str, object] = {"prompt": "Hi", "prompt_embeds": [encoded(TENSOR), encoded(TENSOR[:1])], "echo": True}
    answer, requests = ask(embedding, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert [rows(one) for one in requests[:2]] == [TENSOR.tolist(), TENSOR[:1].tolist()]
    assert [one.embeds.places for one in requests[:2] if one.embeds] == [[(0, 2)], [(0, 1)]]
    assert requests[2].embeds is None
    assert [choice["text"].startswith("Hi") for choice in answer.json()["choices"]] == [False, False, True]
    assert answer.json()["usage"]["prompt_tokens"] == 2 + 1 + len(requests[2].prompt_token_ids)


def test_cached_prefixes_are_those_of_equal_tensors(embedding: Running) -> None:
    bodies = [{"prompt_embeds": encoded(tensor)} for tensor in (TENSOR, TENSOR + 1, TENSOR.double(), TENSOR)]
    salts = [ask(embedding, "/v1/completions", body)[1][0].cache_salt for body in bodies]
    assert salts[0] == salts[2] == salts[3] != salts[1]
    assert len(salts[0]) > 1024, "no user's salt is as long"
    [other] = ask(embedding, "/v1/completions", {**bodies[0], "cache_salt": "mine"})[1]
    assert other.cache_salt != salts[0]


def test_parts_of_a_chat_stand_where_they_are(embedding: Running) -> None:
    parts = [
        {"type": "text", "text": "the <|end|>"},
        {"type": "prompt_embeds", "data": encoded(TENSOR)},
        {"type": "text", "text": "dog"},
        {"type": "prompt_embeds", "data": encoded(TENSOR[1:])},
    ]
    answer, [request] = ask(embedding, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 200, answer.text
    assert rows(request) == [*TENSOR.tolist(), *TENSOR[1:].tolist()]
    assert request.embeds is not None
    tokenizer = embedding.engine.tokenizer
    (first, count), (second, _) = request.embeds.places
    ids = request.prompt_token_ids
    texts = [tokenizer.decode(part, False) for part in (ids[:first], ids[first + count : second], ids[second + 1 :])]
    assert texts == ["<|bos|><|user|>the <|end|>\n", "\ndog\n", "<|end|>\n<|assistant|>"]
    assert tokenizer.token_id("<|end|>") not in ids[:first], "what a user spells stays text"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt_embeds": []}, "Either prompt or prompt_embeds must be provided and non-empty."),
        ({"prompt_embeds": "not base64!"}, "must be the base64"),
        ({"prompt_embeds": base64.b64encode(b"nothing").decode()}, "no file of torch.save"),
        ({"prompt_embeds": encoded(TENSOR[:, :2])}, r"the shape (number of tokens, 3), got (2, 2)"),
        ({"prompt_embeds": encoded(TENSOR[:0])}, "at least one row"),
        ({"prompt_embeds": encoded(TENSOR * torch.inf)}, "finite"),
        ({"prompt_embeds": encoded(TENSOR.long())}, "LongStorage"),
        ({"prompt_embeds": encoded(torch.zeros(600, 3))}, "maximum context length"),
        ({"prompt_embeds": encoded(TENSOR), "prompt_logprobs": True}, "not compatible"),
        ({"prompt_embeds": encoded(TENSOR), "use_beam_search": True}, "not supported with beam search"),
    ],
)
def test_what_is_refused(embedding: Running, body: dict[str, object], says: str) -> None:
    answer, requests = ask(embedding, "/v1/completions", body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert requests == []


@pytest.mark.parametrize("part", [{"type": "prompt_embeds"}, {"type": "prompt_embeds", "data": "not_valid_base64!!"}])
def test_broken_parts_are_refused(embedding: Running, part: dict[str, str]) -> None:
    body: dict[str, object] = {"messages": [{"role": "user", "content": [part]}]}
    answer, _ = ask(embedding, "/v1/chat/completions", body)
    assert answer.status_code == 400


def test_servers_take_them_only_if_they_are_told_to(shared: Running) -> None:
    answer, _ = ask(shared, "/v1/completions", {"prompt_embeds": encoded(TENSOR)})
    assert answer.status_code == 400
    assert "--enable-prompt-embeds" in answer.json()["error"]["message"]
