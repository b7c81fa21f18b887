"""Reading datasets from files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardline.benchmark.workload import Sample


def read_json_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the object of each line that is not empty.

    Raises:
        ValueError: there is no such file, or a line is no JSON object; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--dataset-path {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--dataset-path {path}: not UTF-8 ({error})") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        yield number, value


def require_count(value: Any, name: str, place: str, least: int = 1) -> int:
    """`value` as a number of tokens.

    Raises:
        ValueError: it is none; the message names the field and the place.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < least:
        raise ValueError(f"{place}: {name!r} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def fill_up(samples: list[Sample], count: int, seed: int, *, oversample: bool) -> list[Sample]:
    """At most `count` samples; with `oversample`, exactly so many, some of them repeated."""
    samples = samples[:count]
    if oversample and samples and len(samples) < count:
        samples += random.Random(seed).choices(samples, k=count - len(samples))
    return samples
