"""GET /cluster of a router: what its backends say of themselves, added up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from shardline import __version__
from shardline.config.router import RouterConfig
from shardline.router.fleet import Backend, Fleet
from shardline.router.upstream import UpstreamError
from shardline.server.window import BackendView, Cluster, FirstToken, HostView, Rates, ReplicaView

_SECONDS = 2.0
"""In which a backend must answer."""
_FRESH_SECONDS = 1.0
"""Age up to which an answer serves further viewers with the same key."""
_ANSWER_BYTES = 4 << 20


class FleetWindow:
    """Asks the backends once a second at most, however many look. Its methods belong to one event loop."""

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._started = self._asked = time.monotonic()
        self._key = ""
        self._asking: asyncio.Task[bytes] | None = None

    async def body(self, authorization: str) -> bytes:
        """The answer as JSON. Backends get the viewer's own key, unless the router has one for them."""
        own = self._config.backend_api_key
        key = f"Bearer {own}" if own else authorization
        now = time.monotonic()
        if self._asking is None or key != self._key or now - self._asked > _FRESH_SECONDS:
            self._key, self._asked = key, now
            self._asking = asyncio.create_task(self._ask(key))
        return await asyncio.shield(self._asking)

    async def _ask(self, key: str) -> bytes:
        backends = list(self._fleet.backends)
        views = await asyncio.gather(*(_ask_backend(backend, key) for backend in backends))
        now = time.monotonic()
        states = [
            BackendView(
                one.url, one.state(now), "" if one.is_ready else one.problem, one.num_requests, view is not None
            )
            for one, view in zip(backends, views, strict=True)
        ]
        told = [(one.url, view) for one, view in zip(backends, views, strict=True) if view is not None]
        return msgspec.json.encode(add_up(states, told, self._config.policy, now - self._started))


async def _ask_backend(backend: Backend, key: str) -> Cluster | None:
    """What a backend says; None: it is away, or of another make."""
    headers = [(b"authorization", key.encode("latin-1"))] if key else []
    try:
        status, body = await backend.upstream.get(b"/cluster?history=false", headers, _SECONDS, _ANSWER_BYTES)
        return msgspec.json.decode(body, type=Cluster) if status == 200 else None
    except (UpstreamError, msgspec.DecodeError):
        return None


def add_up(
    backends: Sequence[BackendView], told: Sequence[tuple[str, Cluster]], policy: str, uptime_seconds: float
) -> Cluster:
    """One view of what several servers have told, each with its URL."""
    hosts: list[HostView] = []
    replicas: list[ReplicaView] = []
    for url, view in told:
        for replica in view.replicas:
            ranks = [msgspec.structs.replace(rank, host=rank.host + len(hosts)) for rank in replica.ranks]
            replicas.append(msgspec.structs.replace(replica, index=len(replicas), ranks=ranks, backend=url))
        hosts += view.hosts
    ready = sum(backend.state in ("ready", "busy") for backend in backends)
    views = [view for _, view in told]
    return Cluster(
        time=round(time.time(), 1),
        model=", ".join(dict.fromkeys(view.model for view in views)),
        version=__version__,
        state="ready" if ready == len(backends) else f"{ready} of {len(backends)} backends ready",
        uptime_seconds=round(uptime_seconds, 1),
        router_policy=policy,
        rates=_add_rates(views),
        first_token=_add_first_tokens([view.first_token for view in views]),
        hosts=hosts,
        replicas=replicas,
        notices=[f"{url}: {notice}" for url, view in told for notice in view.notices],
        last_request=None,
        history=None,
        backends=list(backends),
    )


def _add_rates(views: Sequence[Cluster]) -> Rates:
    rates = [view.rates for view in views]
    blocks = [sum(replica.kv_blocks for replica in view.replicas) for view in views]
    prompts = [one.prompt_tokens_per_second for one in rates]
    return Rates(
        running=sum(one.running for one in rates),
        waiting=sum(one.waiting for one in rates),
        kv_usage=_mean([one.kv_usage for one in rates], blocks) or 0.0,
        generation_tokens_per_second=sum(one.generation_tokens_per_second for one in rates),
        prompt_tokens_per_second=sum(prompts),
        hit_rate=_mean([one.hit_rate for one in rates], prompts),
        step_seconds=_mean([one.step_seconds for one in rates], [1] * len(rates)),
    )


def _add_first_tokens(found: Sequence[FirstToken]) -> FirstToken:
    """The count of all; the mean of the medians by requests, and the worst of the others."""
    slow = max((one.p95 for one in found if one.p95 is not None), default=None)
    counts = [one.count for one in found]
    return FirstToken(sum(counts), _mean([one.p50 for one in found], counts), slow)


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted mean of those that are there; None: none is, or none has weight."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None
