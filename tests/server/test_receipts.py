"""Receipts in the answers of every endpoint, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shardline.config.server import ServerConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.receipts.check import check_output
from shardline.receipts.receipt import Receipt, find_receipts, read_receipt
from tests.server.conftest import Running, serve
from tests.server.fake_engine import REPLY
from tests.text.builders import TEMPLATE, byte_level_json, tokenizer

HI = [{"role": "user", "content": "Hi"}]
IDS = [*tokenizer(byte_level_json()).encode_text(REPLY), 1]
"""The reply and the end of text."""
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "Say", "max_tokens": 100}),
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 100}),
    "tokens": ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {}}),
}


@pytest.fixture(scope="module")
def always() -> Iterator[Running]:
    """A server whose answers all have receipts."""
    with serve(ServerConfig(chat_template=TEMPLATE, receipts=True)) as running:
        yield running


def ask(http: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    path, body = ENDPOINTS[name]
    if name == "tokens":
        own = {key: fields.pop(key) for key in ("receipt", "seed", "temperature", "n") if key in fields}
        body = {**body, "sampling_params": own}
    return http.post(path, json={**body, **fields})


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def receipts_in(value: Any) -> list[Receipt]:
    """Wherever they stand in what JSON decodes to."""
    if isinstance(value, list):
        return [receipt for part in value for receipt in receipts_in(part)]
    if not isinstance(value, dict):
        return []
    own = [read_receipt(value["receipt"])] if "receipt" in value else []
    return own + [receipt for key, part in value.items() if key != "receipt" for receipt in receipts_in(part)]


def check(receipt: Receipt, seed: int) -> None:
    """The fake engine says REPLY, and its digests are all "d"."""
    assert (receipt.output_token_ids, receipt.seed, receipt.choice) == (IDS, str(seed), 0)
    assert receipt.contract == NumericContract("fake")
    assert receipt.sampling["temperature"] == 0.5
    assert check_output(receipt, IDS, ["d"] * len(IDS)).equal


@pytest.mark.parametrize("name", ENDPOINTS)
def test_answers_and_last_events_have_a_receipt(always: Running, name: str) -> None:
    asked = {"temperature": 0.5, "seed": 9, "receipt": True}
    with always.http() as http:
        answer = ask(http, name, **asked)
        assert answer.status_code == 200, answer.text
        [receipt] = find_receipts(answer.content)
        check(receipt, 9)
        parts = events(ask(http, name, **asked, stream=True))
        assert receipts_in(parts) == [receipt]
        last = [part for part in parts if receipts_in(part)]
        assert len(last) == 1
        assert len(parts) - parts.index(last[0]) <= 2, "only the end of the message comes after it"
        plain = ask(http, name, receipt=False)
        assert "receipt" not in plain.text
        if name != "tokens":
            [drawn] = find_receipts(ask(http, name).content)
            assert drawn.seed != receipt.seed


def test_each_choice_has_its_own_receipt(http: httpx.Client) -> None:
    for name in ("completions", "chat"):
        asked = {"temperature": 0.5, "seed": 9, "receipt": True, "n": 3}
        found = find_receipts(ask(http, name, **asked).content)
        check(found[0], 9)
        assert [receipt.choice for receipt in found] == [0, 1, 2]
        assert len({receipt.digest for receipt in found}) == 3
        assert sorted(receipts_in(events(ask(http, name, **asked, stream=True))), key=lambda one: one.choice) == found
        assert "logits_digests" not in ask(http, name, **asked).text


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 0, "receipt": True}, {"use_beam_search": True, "n": 2, "receipt": True}, {"receipt": "yes"}],
)
def test_what_can_have_no_receipt_is_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = ask(http, "completions", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "receipt"


def test_a_stop_string_ends_the_receipt_too(http: httpx.Client) -> None:
    [receipt] = find_receipts(ask(http, "completions", stop=REPLY[3:5], receipt=True).content)
    assert receipt.output_token_ids == IDS[: len(receipt.output_token_ids)]
    assert 0 < len(receipt.output_token_ids) < len(IDS)
    assert REPLY[3:5] not in str(receipt.sampling)
