"""Which backend gets a request, and what the router learns from its answer."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from shardline.config.router import RouterConfig
from shardline.router.fleet import Fleet
from shardline.router.prompts import Prompt
from tests.router.backends import (
    Call,
    Site,
    set_event,
)


def test_a_conversation_stays_where_its_cache_is(site: Site) -> None:
    backends = [site.add_backend(), site.add_backend(), site.add_backend()]
    site.start_router()
    for number in range(6):
        talk = f"conversation {number} " * 40
        for turn in range(4):
            site.ask(talk + "and " * turn)
    homes: dict[str, set[str]] = {}
    for backend in backends:
        for call in backend.calls:
            homes.setdefault(call.fields["prompt"][:15], set()).add(backend.name)
    assert all(len(home) == 1 for home in homes.values()), homes


def test_a_prompt_is_pending_until_its_first_token(site: Site) -> None:
    """The first event of a chat has a role, and comes before the prompt is computed."""
    go_on = asyncio.Event()

    async def answer_late(call: Call) -> None:
        await call.begin_stream()
        await call.send_event("role")
        await go_on.wait()
        await call.send_event("token")
        await call.end_stream()

    site.add_backend(answer_late)
    site.start_router()
    body = {"model": "m", "stream": True, "prompt": "x" * 2000}
    with site.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: role"
        assert site.fleet.backends[0].pending_chunks == 7
        site.run(set_event(go_on))
        while next(lines) != "data: token":
            pass
        assert site.fleet.backends[0].pending_chunks == 0
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_backends_are_measured() -> None:
    fleet = Fleet(RouterConfig(("http://a", "http://b")))
    for number in range(40):
        slowness = 1 + 3 * (number % 2)
        choice = fleet.choose(Prompt(text=f"{number} ".encode().ljust(2048)), [fleet.backends[number % 2]])
        choice.begin()
        choice.begun = time.monotonic() - 20 * 1.0 * slowness
        choice.sent = choice.begun - (1.0 + 8 * 0.5) * slowness
        fleet.note_pace(choice, 21)
    fleet.note_pace(fleet.choose(Prompt(text=b"y" * 2048), fleet.backends), 0)  # it has ended without a part
    decision = fleet.choose(Prompt(text=b"x" * 2048), fleet.backends).decision
    fast, slow = decision.replicas
    assert fast.number == 0
    assert (slow.request_cost, slow.chunk_cost) > (2 * fast.request_cost, 2 * fast.chunk_cost)
    assert fast.request_cost / fast.chunk_cost == pytest.approx(2.0, rel=0.3)


def test_a_choice_can_be_explained(site: Site) -> None:
    backend = site.add_backend()
    site.start_router()
    headers = {"x-shardline-route": "1"}
    answer = site.client.post("/v1/completions", json={"model": "m"}, headers=headers)
    assert answer.headers["x-shardline-route"].startswith(f"{backend.url}; policy=least_work; attempt=1")
    assert "x-shardline-route" not in backend.calls[0].headers
    assert "x-shardline-route" not in site.ask().headers


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_was_expected_in_caches_is_compared_with_what_was_there(site: Site, is_stream: bool) -> None:
    usage = {"usage": {"prompt_tokens": 80, "prompt_tokens_details": {"cached_tokens": 20}}}

    async def with_usage(call: Call) -> None:
        if not is_stream:
            await call.answer(200, usage)
            return
        await call.begin_stream()
        await call.send_event("one")
        await call.send_event(json.dumps(usage))
        await call.end_stream()

    backend = site.add_backend(with_usage)
    site.start_router()
    for _ in range(2):
        assert site.ask("x" * 1024, stream=is_stream).status_code == 200
    metrics = site.client.get("/metrics").text
    for kind, count in (("all", 8.0), ("expected", 4.0), ("found", 2.0)):
        assert f'prompt_chunks_total{{backend="{backend.url}",kind="{kind}"}} {count}' in metrics
    assert site.fleet.backends[0].pending_chunks == 0
