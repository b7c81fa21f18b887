"""What a server's own counters say of a run: its drafts, and how busy its ranks were."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.benchmark.http_client import HttpClient

_DRAFTS = re.compile(r"(?:shardline|vllm):spec_decode_num_(\w+)_total(\{[^}]*\})? (\S+)")
_POSITION = re.compile(r'position="(\d+)"')
_RANK_SECONDS = re.compile(r"shardline:rank_(busy|waiting)_seconds_total\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(engine|rank)="(\d+)"')
_SECONDS = 5.0


@dataclass
class Counters:
    """The counters of a server at one moment; all are empty if it shows none."""

    drafts: dict[str, int] = field(default_factory=dict)
    """Those of all engines by the ends of their names; accepted tokens by position as "0", "1" and so on."""
    ranks: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    """Seconds by engine and rank: "busy" and "waiting"."""


async def fetch_counters(client: HttpClient, headers: Mapping[str, str]) -> Counters:
    """The counters of a server."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_SECONDS):
            status, body = await client.fetch("GET", "/metrics", dict(headers))
        if status == 200:
            return read_counters(body.decode(errors="replace"))
    return Counters()


def read_counters(text: str) -> Counters:
    """The counters in a page of metrics."""
    counters = Counters()
    for name, labels, value in _DRAFTS.findall(text):
        position = _POSITION.search(labels)
        key = position.group(1) if position else name
        with contextlib.suppress(ValueError):
            counters.drafts[key] = counters.drafts.get(key, 0) + int(float(value))
    for kind, labels, value in _RANK_SECONDS.findall(text):
        place = dict(_LABEL.findall(labels))
        with contextlib.suppress(ValueError, KeyError):
            rank = int(place["engine"]), int(place["rank"])
            counters.ranks.setdefault(rank, {})[kind] = float(value)
    return counters


def server_figures(before: Counters, after: Counters, seconds: float) -> dict[str, Any]:
    """The figures of a run of so many seconds, by their keys in the result; empty without drafts and several ranks."""
    return _draft_figures(before.drafts, after.drafts) | _rank_figures(before, after, seconds)


def _draft_figures(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Any]:
    made = {name: count - before.get(name, 0) for name, count in after.items()}
    drafts, tokens, accepted = (made.get(name, 0) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    if drafts <= 0 or tokens <= 0:
        return {}
    positions = sorted((name for name in made if name.isdigit()), key=int)
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [made[position] / drafts for position in positions],
    }


def _rank_figures(before: Counters, after: Counters, seconds: float) -> dict[str, Any]:
    ranks = sorted(after.ranks)
    if len(ranks) < 2:
        return {}

    def share(rank: tuple[int, int], kind: str) -> float:
        spent = after.ranks[rank].get(kind, 0.0) - before.ranks.get(rank, {}).get(kind, 0.0)
        return max(0.0, min(1.0, spent / seconds))

    busy = [share(rank, "busy") for rank in ranks]
    return {
        "ranks": [f"{engine}/{rank}" for engine, rank in ranks],
        "rank_busy_shares": busy,
        "rank_waiting_shares": [share(rank, "waiting") for rank in ranks],
        "bubble": 1.0 - sum(busy) / len(busy),
    }
