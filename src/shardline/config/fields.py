"""Configuration fields that carry their own help text, so that CLI flags are generated from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


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
