"""The physical constants of an engine, which step times are computed with."""

from __future__ import annotations

from dataclasses import dataclass


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
