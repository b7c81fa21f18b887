"""Responses in the background, and the items that a response was made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.server.openai.responses.store import ResponseStore
from tests.server.conftest import Running, serve, wait_until
from tests.server.test_responses import TEMPLATE, last_prompt


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serve(ServerConfig(chat_template=TEMPLATE, reasoning_parser="deepseek_v3")) as running:
        yield running


@pytest.fixture(autouse=True)
def running_engine(shared: Running) -> Iterator[None]:
    yield
    shared.engine.resume()
    shared.engine.seconds_per_token = 0.0


def test_a_response_is_made_while_nobody_waits(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "Hello."
    shared.engine.paused = True
    begun = client.responses.create(model="demo", input="Hi", background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    assert client.responses.retrieve(begun.id).status == "queued"
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.responses.create(model="demo", input="And?", previous_response_id=begun.id)
    shared.engine.resume()
    wait_until(lambda: client.responses.retrieve(begun.id).status != "queued")
    ended = client.responses.retrieve(begun.id)
    assert (ended.status, ended.output_text) == ("completed", "Hello.")
    assert client.responses.cancel(begun.id) == ended, "a response that has ended stays as it is"
    client.responses.create(model="demo", input="And?", previous_response_id=begun.id)
    assert "Hi<|end|><|assistant|>Hello.<|end|><|user|>And?" in last_prompt(shared)


def test_a_response_can_be_cancelled(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.paused = True
    begun = client.responses.create(model="demo", input="Hi", background=True)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled"
    wait_until(lambda: shared.engine.num_running() == 0)
    assert any(name.startswith(begun.id) for name in shared.engine.aborted)


def test_a_response_can_be_deleted_while_it_is_made(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.paused = True
    begun = client.responses.create(model="demo", input="Hi", background=True)
    client.responses.delete(begun.id)
    wait_until(lambda: shared.engine.num_running() == 0)
    for call in (client.responses.retrieve, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(begun.id)


def test_only_responses_in_the_background_are_cancelled_or_followed(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "Hello."
    whole = client.responses.create(model="demo", input="Hi")
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):
        client.responses.cancel(whole.id)
    with pytest.raises(openai.BadRequestError, match="'background' and 'stream'"):
        list(client.responses.retrieve(whole.id, stream=True))


def test_a_stream_can_be_taken_up_again(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "<think>Hm.</think>Hello, world."
    shared.engine.seconds_per_token = 0.002
    stream = client.responses.create(model="demo", input="Hi", background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    assert first.response.status == "queued"
    response_id = first.response.id
    stream.close()
    followed = list(client.responses.retrieve(response_id, stream=True, starting_after=0))
    assert [event.sequence_number for event in followed] == list(range(1, len(followed) + 1))
    assert (followed[0].type, followed[-1].type) == ("response.in_progress", "response.completed")
    replayed = list(client.responses.retrieve(response_id, stream=True))
    assert replayed[1:] == followed
    assert replayed[0] == first
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=len(followed))) == []
    ended = followed[-1]
    assert ended.type == "response.completed"
    assert client.responses.retrieve(response_id) == ended.response


@pytest.mark.slow
def test_a_response_that_fails_says_so() -> None:
    ends = EngineConfig.from_options(on_failure="exit")
    with serve(engine_config=ends) as running, running.openai() as client:
        running.engine.die_after_steps = 3
        events = list(client.responses.create(model="demo", input="Hi", background=True, stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        assert "rank 1 was killed" in events[-1].response.error.message


def test_input_items_can_be_listed(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "<think>Hm.</think>Hello."
    first = client.responses.create(model="demo", input="Hi")
    own: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": text}]} for text in ("A", "B")]
    second = client.responses.create(model="demo", input=own, previous_response_id=first.id)
    newest = client.responses.input_items.list(second.id)
    kinds = [(item.type, getattr(item, "role", None)) for item in newest]
    assert kinds == [("message", "user")] * 2 + [("message", "assistant"), ("reasoning", None), ("message", "user")]
    texts = [item.content[0].text for item in newest if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["B", "A", "Hello.", "Hi"]
    paged = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.id for item in paged] == [item.id for item in newest][::-1]
    assert [item.id for item in client.responses.input_items.list(first.id)] == [paged[0].id]
    with shared.http() as http:
        refused = http.get(f"/v1/responses/{first.id}/input_items?limit=0")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")
        assert http.get("/v1/responses/resp_none/input_items").status_code == 404


def test_an_ended_response_takes_the_room_that_it_needs() -> None:
    store = ResponseStore(100)
    assert store.add_response("a", b"aa", b"1", None)
    store.end_response("a", b"a" * 20, b"1" * 10, [b"e" * 5, b"e" * 5])
    assert (store.num_bytes, store.find_events("a")) == (40, [b"e" * 5, b"e" * 5])
    assert store.add_response("b", b"bb", b"2", "a")
    store.end_response("b", b"b" * 51, b"2" * 10, ())
    assert store.find_answer("a") is None
    assert store.find_items("b") == [b"1" * 10, b"2" * 10]
    store.end_response("b", b"b" * 101, b"2", ())
    assert (len(store), store.num_bytes) == (0, 0)
    store.end_response("b", b"b", b"2", ())
    assert len(store) == 0
