"""Configuration fields that carry their own help text, so that CLI flags are generated from them, and sizes as people
write them in these fields."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_COUNT_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    alone: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag.

    The flag is the field's name with dashes. `aliases` are other spellings, without the leading dashes.
    `alone`: the value of the flag with nothing behind it; None: something must be.
    `refused`: further values, which are not offered. They are refused later, with what would work instead.
    """
    metadata: Mapping[str, Any] = {
        "help": help,
        "choices": choices,
        "refused": refused,
        "aliases": aliases,
        "alone": alone,
    }
    return dataclasses.field(default=default, metadata=metadata)


def parse_count(text: str) -> int:
    """A whole number, or one with k, m, g (powers of 1000, also behind a fraction) or K, M, G (of 1024), as in vLLM.

    Raises:
        ValueError: `text` is no such number.
    """
    match = re.fullmatch(r"([0-9]+)(?:([KMG])|(\.[0-9]+)?([kmg]))", text.strip())
    if match is None:
        return int(text)
    whole, binary, fraction, decimal = match.groups()
    return int(float(whole + (fraction or "")) * _COUNT_FACTORS[binary or decimal])


def parse_bytes(text: str | int) -> int:
    """Bytes in `text`: a plain number, or one with k, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (of 1024).

    Raises:
        ValueError: `text` is no size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match.group(2) not in _FACTORS:
        raise ValueError(f"{text!r} is not a size; write for example 4GiB, 512MiB or 4000000000")
    return int(float(match.group(1)) * _FACTORS[match.group(2)])


def format_bytes(count: int | float) -> str:
    """`count` bytes as text, in the largest binary unit in which the number is at least 1."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def json_object(name: str, text: str | None) -> dict[str, Any]:
    """The JSON object of an option; empty: it is not set.

    Raises:
        ValueError: it is something else.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, TypeError):  # vLLM also takes a function
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {text!r}")
    return value
