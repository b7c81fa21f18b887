"""The constants of an engine's step times, and how far predictions with them are from measurements."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Constants:
    """The physical constants of an engine. They are fitted to published rows; see `timing.json` and docs/planner.md."""

    memory: float
    """Share of the memory's bandwidth at which weights are read."""
    cache: float
    """Share of the bandwidth at which keys and values are read, and activations are moved."""
    compute: float
    """Share of the arithmetic rate that large products reach."""
    link: float
    """Share of a link's rate that large exchanges reach."""
    message: float
    """Seconds of an exchange in addition to its bytes."""
    launch: float
    """Seconds of a kernel in addition to what it reads and computes."""
    step: float
    """Seconds of a step on the host."""
    request: float
    """Seconds of a step for each running request."""
    first: float
    """Seconds that a request's first token takes besides steps: HTTP, tokens, scheduling."""
    shown: float
    """Decode steps before a prompt's step begins and until its token is sent: the step in flight, and streaming."""
    together: float
    """Share of the wait of prompts that all come at once that is left after the start of a benchmark.

    Requests of unlike lengths that begin together still end near each other.
    """
    queue: float
    """Wait for others among requests of equal lengths, in times of the prompt, for each further root of a request.

    Such requests stay in groups.
    """
    attention: float
    """Share of `compute` that attention of prompts reaches."""
    expanded: float
    """Share of `compute` that grouped products of experts reach with weights in a format that the GPU does not have."""
    saturated: float
    """Share of the speed of a closed loop that a saturated run reaches.

    Its GPUs lower their clocks at full power, batches are padded to captured sizes, and the last requests run alone.
    """


class Interval(NamedTuple):
    """A prediction: the median, and the bounds of its 80% interval."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class Timing:
    """Constants, and how far predictions with them are from measurements."""

    constants: Constants
    spread: Mapping[str, tuple[float, float]]
    """For "ttft", "tpot" and "output_tok_s": factors from a prediction to the bounds of its 80% interval."""
    calibrated: Mapping[str, tuple[float, float]] | None = None
    """The same for a machine that was measured at another load; None: not known."""

    def interval(self, quantity: str, value: float) -> Interval:
        """The 80% interval of a predicted `quantity`."""
        low, high = self.spread[quantity]
        return Interval(value * low, value, value * high)


@functools.cache
def shipped_timing() -> Mapping[str, Timing]:
    """For each engine, the constants fitted to published rows. This engine's are vLLM's, until there are rows of it."""
    values = json.loads(Path(__file__).with_name("timing.json").read_text(encoding="utf-8"))
    timings = {
        engine: Timing(Constants(**fitted["constants"]), _spread(fitted["spread"]), _spread(values["calibrated"]))
        for engine, fitted in values["engines"].items()
    }
    return {**timings, "shardline": timings["vllm"]}


def _spread(bounds: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    return {name: (low, high) for name, (low, high) in bounds.items()}
