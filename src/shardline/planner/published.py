"""What published rows, and the tools that measured them, call the formats of weights: `published.toml`."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec


class PublishedNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of `published.toml`, which says what they mean."""

    labels: dict[str, str]
    bench_element_bytes: dict[str, float]
    patterns: dict[str, str]
    variants: dict[str, list[str]]


@functools.cache
def published_names() -> PublishedNames:
    """The names that the planner knows."""
    text = Path(__file__).with_name("published.toml").read_bytes()
    return msgspec.toml.decode(text, type=PublishedNames)
