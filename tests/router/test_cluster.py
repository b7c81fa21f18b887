"""A router's /cluster adds up what its backends say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shardline.server.window import Cluster, FirstToken, HostView, RankView, Rates, ReplicaView
from tests.router.backends import Call, Site


def view(name: str, tokens: float, blocks: int, kv_usage: float, p50: float | None, count: int) -> Cluster:
    rates = Rates(
        running=2,
        waiting=1,
        kv_usage=kv_usage,
        generation_tokens_per_second=tokens,
        prompt_tokens_per_second=tokens,
        hit_rate=0.5 if tokens else None,
        step_seconds=0.01,
    )
    rank = RankView(0, 0, "CPU", 7, 1, 0, 0, 0, [0, 3], 10, 20, 0.5, 0.1, 0.01)
    replica = ReplicaView(0, alive=True, rates=rates, kv_blocks=blocks, ranks=[rank])
    first = FirstToken(count, p50, p50)
    return Cluster(
        0.0,
        "m",
        "1",
        "ready",
        1.0,
        "least_loaded",
        rates,
        first,
        [HostView(name)],
        [replica],
        [f"{name} idles"],
        None,
        None,
    )


def saying(seen: Cluster) -> Any:
    async def behave(call: Call) -> None:
        assert call.path == "/cluster?history=false"
        await call.answer(200, msgspec.to_builtins(seen))

    return behave


async def not_there(call: Call) -> None:
    await call.answer(404, {"error": {"message": "what?"}})


async def garbage(call: Call) -> None:
    await call.answer(200, {"rates": 3})


def test_servers_are_added_up(site: Site) -> None:
    one = site.add_backend(saying(view("a", 10.0, 100, 0.5, 0.1, 3)))
    two = site.add_backend(saying(view("b", 30.0, 300, 0.1, 0.2, 1)))
    others = [site.add_backend(behave) for behave in (not_there, garbage)]
    site.start_router()
    seen = site.client.get("/cluster", headers={"Authorization": "Bearer mine"}).json()
    assert seen["state"] == "ready"
    assert (seen["rates"]["running"], seen["rates"]["generation_tokens_per_second"]) == (4, 40.0)
    assert seen["rates"]["kv_usage"] == pytest.approx(0.2)
    assert seen["rates"]["hit_rate"] == 0.5
    assert (seen["first_token"]["count"], seen["first_token"]["p95"]) == (4, 0.2)
    assert seen["first_token"]["p50"] == pytest.approx(0.125)
    assert [host["name"] for host in seen["hosts"]] == ["a", "b"]
    assert [(one["index"], one["backend"], one["ranks"][0]["host"]) for one in seen["replicas"]] == [
        (0, one.url, 0),
        (1, two.url, 1),
    ]
    assert seen["notices"] == [f"{one.url}: a idles", f"{two.url}: b idles"]
    assert [one["has_view"] for one in seen["backends"]] == [True, True, False, False]
    assert [one["url"] for one in seen["backends"][2:]] == [other.url for other in others]
    assert one.calls[0].headers["authorization"] == "Bearer mine"


def test_viewers_share_an_answer_if_their_keys_are_equal(site: Site) -> None:
    backend = site.add_backend(saying(view("a", 10.0, 100, 0.5, 0.1, 3)))
    site.start_router()
    for _ in range(5):
        assert site.client.get("/cluster").status_code == 200
    asked = len(backend.calls)
    assert asked <= 3  # one a second
    site.client.get("/cluster", headers={"Authorization": "Bearer other"})
    assert len(backend.calls) == asked + 1


def test_without_backends_it_says_so(site: Site) -> None:
    site.start_router()
    seen = site.client.get("/cluster").json()
    assert (seen["replicas"], seen["rates"]["running"], seen["rates"]["hit_rate"]) == ([], 0, None)
