"""What GET /cluster says, as data."""

from __future__ import annotations

from typing import Any

import msgspec


class RankView(msgspec.Struct, frozen=True):
    """One rank, and how it has spent the last seconds."""

    rank: int
    host: int
    """Its place in `hosts`."""
    device: str
    pid: int
    threads: int
    dp: int
    pp: int
    tp: int
    layers: list[int] | None
    """The first and the last layer of its stage."""
    weight_bytes: int
    kv_bytes: int
    busy: float = 0.0
    """Share of the time in which it computed."""
    waiting: float = 0.0
    """Share of the time in which it waited for other ranks."""
    step_seconds: float | None = None
    """Mean; null: it has run no step."""
    cp: int = 0


class HostView(msgspec.Struct, frozen=True):
    """One computer."""

    name: str
    address: str = ""
    cores: int = 0
    memory_bytes: int = 0
    devices: list[str] = []


class Rates(msgspec.Struct, frozen=True):
    """Gauges, and rates over the last seconds."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV blocks in use."""
    generation_tokens_per_second: float
    prompt_tokens_per_second: float
    hit_rate: float | None
    """Prompt tokens found in the prefix cache, as a share of those looked up; null: none was."""
    step_seconds: float | None
    """Mean; null: there was no step."""


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica and its ranks."""

    index: int
    alive: bool
    rates: Rates
    kv_blocks: int
    ranks: list[RankView]
    """Replicas in lockstep share theirs, which are those of the first one."""
    backend: str = ""
    """Of a router: the URL of the server that has it."""


class FirstToken(msgspec.Struct, frozen=True):
    """Seconds from arrival to the first token, of the last minute's requests; null: there were none."""

    count: int
    p50: float | None
    p95: float | None


class BackendView(msgspec.Struct, frozen=True):
    """A server behind a router."""

    url: str
    state: str
    problem: str
    requests: int
    """Those that the router has in flight there."""
    has_view: bool
    """Whether it has told of its ranks; servers of other makes do not."""


class History(msgspec.Struct, frozen=True):
    """The last ten minutes: one entry a second in each list, the oldest first."""

    times: list[float]
    """Seconds since 1970."""
    series: dict[str, list[float | None]]
    """By the names of the fields of `rates`; and `first_token`, the median of the minute before."""
    busy: list[list[list[int]]]
    """For each replica and each of its ranks, the busy share in percent."""


class Cluster(msgspec.Struct, frozen=True):
    """A server and its ranks at one moment."""

    time: float
    """Seconds since 1970."""
    model: str
    version: str
    state: str
    uptime_seconds: float
    router_policy: str
    rates: Rates
    """Of all replicas together."""
    first_token: FirstToken
    hosts: list[HostView]
    replicas: list[ReplicaView]
    notices: list[str]
    """What keeps ranks from sharing the work, in words."""
    last_request: dict[str, Any] | None
    """Where the time of the request went that has ended last, as in GET /requests/{id}."""
    history: History | None
    backends: list[BackendView] = []
    """Of a router; a server has none."""
