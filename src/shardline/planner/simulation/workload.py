"""Requests to simulate: a Poisson process, or a trace in JSON lines."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardline.config.parallel import ParallelConfig

_BLOCK_TOKENS = 512
"""Tokens for each of `hash_ids` in a trace of Mooncake's form."""
_MOST_TOKENS = 10_000_000
"""Of a prompt or an output: no model has so many positions."""
_KEYS = {
    "arrival": ("arrival", "arrived_at", "timestamp"),
    "input_len": ("input_len", "input_length", "prompt_tokens"),
    "output_len": ("output_len", "output_length", "output_tokens"),
}


class SimulatedRequest(NamedTuple):
    """A request by its time and lengths."""

    arrival: float
    """Seconds since the start."""
    prompt: tuple[tuple[int, int], ...]
    """(token id, how often in a row). Equal beginnings are common prefixes."""
    output_len: int

    @property
    def input_len(self) -> int:
        return sum(count for _, count in self.prompt)

    def token_ids(self) -> list[int]:
        tokens: list[int] = []
        for token, count in self.prompt:
            tokens += [token] * count
        return tokens


class Prefixes(NamedTuple):
    """Beginnings that prompts share."""

    length: int = 0
    """Tokens; they are part of the prompt's length."""
    number: int = 1
    """Different beginnings, each as likely as the others."""


_NO_PREFIXES = Prefixes()


@dataclass(frozen=True)
class Workload:
    """What is simulated: the requests of a trace, or requests at random times with the lengths of the demand."""

    trace: tuple[SimulatedRequest, ...] = ()
    rate: float = math.inf
    """Requests a second without a trace. inf: all at once."""
    num_prompts: int = 1000
    """Requests without a trace."""
    prefixes: Prefixes = _NO_PREFIXES
    seed: int = 0
    prefix_caching: bool = True
    replicas: int | None = None
    """None: those of the layout."""
    policy: str = ParallelConfig.router_policy
    """Of the router."""
    report_seconds: float = 0.1
    """Age that the load of replicas may have when a router looks at it."""

    def __post_init__(self) -> None:
        """See that numbers are in their ranges.

        Raises:
            ValueError: one is not.
        """
        for flag, value, least in (
            ("--num-prompts", self.num_prompts, 1),
            ("--prefix-len", self.prefixes.length, 0),
            ("--num-prefixes", self.prefixes.number, 1),
            ("--replicas", 1 if self.replicas is None else self.replicas, 1),
        ):
            if value < least:
                raise ValueError(f"{flag} must be at least {least}, got {value}")


def poisson(
    rate: float, count: int, input_len: int, output_len: int, prefixes: Prefixes | None = None, seed: int = 0
) -> Iterator[SimulatedRequest]:
    """`count` requests that arrive independently of each other, `rate` per second on average. inf: all at once.

    Raises:
        ValueError: prefixes are longer than prompts.
    """
    shared = prefixes or Prefixes()
    if shared.length > input_len:
        raise ValueError(f"--prefix-len {shared.length} must be at most --input-len {input_len}")
    return _poisson(rate, count, input_len, output_len, shared, random.Random(seed))


def _poisson(
    rate: float, count: int, input_len: int, output_len: int, shared: Prefixes, dice: random.Random
) -> Iterator[SimulatedRequest]:
    now = 0.0
    for number in range(count):
        now += 0.0 if math.isinf(rate) else dice.expovariate(rate)
        common = ((-1 - dice.randrange(shared.number), shared.length),) if shared.length else ()
        yield SimulatedRequest(now, (*common, *_unique(number, input_len - shared.length)), output_len)


def _unique(number: int, count: int) -> tuple[tuple[int, int], ...]:
    """`count` tokens that no other request has at this place."""
    return ((number + 1, 1), (0, count - 1)) if count > 0 else ()


def read_trace(path: Path, limit: int | None = None) -> tuple[SimulatedRequest, ...]:
    """The first `limit` requests of a file with a JSON object in each line, in order of arrival; None: all of them.

    An object has `arrival` in seconds (or `timestamp` in milliseconds), `input_len`, `output_len`, and perhaps `prefix`
    (any text) with `prefix_len`, or `hash_ids`: equal ids in the same place stand for 512 equal tokens.

    Raises:
        ValueError: the file cannot be read, or a line is wrong. The message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--trace {path} cannot be read: {error}") from None
    requests = []
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line), number, names))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"--trace {path}, line {number}: {why}") from None
    if not requests:
        raise ValueError(f"--trace {path} has no requests")
    return tuple(sorted(requests, key=lambda request: request.arrival)[:limit])


def _request(line: Mapping[str, Any], number: int, names: dict[str, int]) -> SimulatedRequest:
    if not isinstance(line, dict):
        raise ValueError('it must be an object such as {"arrival": 0.5, "input_len": 1024, "output_len": 128}')
    arrival = float(_value(line, "arrival")) * (1e-3 if "timestamp" in line and "arrival" not in line else 1.0)
    input_len, output_len = int(_value(line, "input_len")), int(_value(line, "output_len"))
    if not (math.isfinite(arrival) and arrival >= 0) or min(input_len, output_len) < 1:
        raise ValueError("arrival must be at least 0 seconds, and lengths at least 1 token")
    if max(input_len, output_len) > _MOST_TOKENS:
        raise ValueError(f"lengths must be at most {_MOST_TOKENS:,} tokens")
    prompt: list[tuple[int, int]] = []
    if not isinstance(line.get("hash_ids", []), list):
        raise ValueError("hash_ids must be a list of numbers")
    for place, identifier in enumerate(line.get("hash_ids", [])):
        prompt.append((-2 - int(identifier), min(_BLOCK_TOKENS, max(0, input_len - place * _BLOCK_TOKENS))))
    length = int(line.get("prefix_len", 0))
    if length:
        if not 0 < length <= input_len:
            raise ValueError(f"prefix_len {length} must be from 0 to input_len {input_len}")
        prompt = [(-1 - names.setdefault(str(line["prefix"]), len(names)), length)]
    rest = input_len - sum(count for _, count in prompt)
    return SimulatedRequest(arrival, (*prompt, *_unique(number, rest)), output_len)


def _value(line: Mapping[str, Any], name: str) -> Any:
    for key in _KEYS[name]:
        if key in line:
            return line[key]
    raise KeyError(name)
