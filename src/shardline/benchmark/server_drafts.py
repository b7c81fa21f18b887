"""How many tokens of drafts a server accepted during a run, from its metrics: vLLM's names and figures."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shardline.benchmark.http_client import HttpClient

_LINE = re.compile(r"(?:shardline|vllm):spec_decode_num_(\w+)_total(\{[^}]*\})? (\S+)")
_POSITION = re.compile(r'position="(\d+)"')
_SECONDS = 5.0

DraftCounts = Counter[str]
"""Counters of all engines by the ends of their names; accepted tokens by position as "0", "1" and so on."""


async def fetch_drafts(client: HttpClient, headers: Mapping[str, str]) -> DraftCounts:
    """The counters of a server; empty: it makes no drafts, or shows no metrics."""
    with contextlib.suppress(OSError, TimeoutError):
        status, body = await asyncio.wait_for(client.fetch("GET", "/metrics", dict(headers)), _SECONDS)
        if status == 200:
            return read_drafts(body.decode(errors="replace"))
    return Counter()


def read_drafts(text: str) -> DraftCounts:
    """The counters of drafts in a page of metrics."""
    counts: DraftCounts = Counter()
    for name, labels, value in _LINE.findall(text):
        position = _POSITION.search(labels)
        with contextlib.suppress(ValueError):
            counts[position.group(1) if position else name] += int(float(value))
    return counts


def draft_figures(before: DraftCounts, after: DraftCounts) -> dict[str, Any]:
    """The figures of a run, by their keys in the result; empty if no draft was made."""
    drafts, tokens, accepted = (after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    if drafts <= 0 or tokens <= 0:
        return {}
    positions = sorted(int(name) for name in after if name.isdigit())
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [
            (after[str(position)] - before[str(position)]) / drafts for position in positions
        ],
    }
