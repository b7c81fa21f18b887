"""What a simulation says: a line on the terminal while it runs, and what became of the workload."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 50
_SHOW_AFTER = 2.0
"""Seconds. A shorter simulation needs no line."""
_SECONDS_BETWEEN = 0.5


@dataclass(frozen=True)
class Simulation:
    """What became of a workload. Times in virtual seconds."""

    num_requests: int
    num_failed: int
    """Requests that are too long for the layout."""
    num_replicas: int
    policy: str
    seconds: float
    """From the first arrival to the last token."""
    ttft: dict[int, float]
    """Percentiles, keyed by their number."""
    tpot: dict[int, float]
    latency: dict[int, float]
    """From the arrival to the last token."""
    output_tokens_per_second: float
    requests_per_second: float
    goodput: float
    """Requests per second that met the limits of TTFT and TPOT."""
    num_preemptions: int
    prefix_hit_rate: float
    """Share of the prompts' tokens that were found in the prefix cache."""
    kv_use: tuple[tuple[float, float], ...]
    """(seconds, share of the KV cache in use) over time, averaged over replicas."""
    num_steps: int
    num_skipped: int
    """Decode steps that were done together with others."""


def format_simulation(simulation: Simulation) -> str:
    """The simulation as text."""
    tokens = simulation.output_tokens_per_second
    lines = [
        f"simulated: {simulation.num_requests:,} requests in {simulation.seconds:,.1f} s on {simulation.num_replicas} "
        f"replica{'s' * (simulation.num_replicas != 1)} ({simulation.policy})",
        f"  TTFT s    {_row(simulation.ttft, 1, 3)}",
        f"  TPOT ms   {_row(simulation.tpot, 1e3, 2)}",
        f"  latency s {_row(simulation.latency, 1, 2)}",
        f"  {tokens:,.0f} output tokens/s, {simulation.requests_per_second:.2f} requests/s, "
        f"goodput {simulation.goodput:.2f} requests/s within the limits",
        f"  {simulation.num_preemptions:,} preemptions, {simulation.prefix_hit_rate:.0%} of the prompts' tokens from "
        f"the prefix cache, {simulation.num_steps:,} steps",
        f"  KV cache in use, 0 to 100% over time: |{_bars([share for _, share in simulation.kv_use])}| at most "
        f"{max((share for _, share in simulation.kv_use), default=0.0):.0%}",
    ]
    if simulation.num_failed:
        lines.append(f"  left out, since --max-model-len is shorter: {simulation.num_failed:,} requests")
    return "\n".join(lines)


def _row(percentiles: dict[int, float], factor: float, digits: int) -> str:
    return "  ".join(f"p{number} {factor * value:.{digits}f}" for number, value in percentiles.items())


def _bars(shares: list[float]) -> str:
    """One character for each of at most `_WIDTH` spans of time."""
    size = -(-len(shares) // _WIDTH) or 1
    spans = [shares[start : start + size] for start in range(0, len(shares), size)]
    return "".join(_BARS[round(min(1.0, sum(span) / len(span)) * (len(_BARS) - 1))] for span in spans)


def simulation_json(simulation: Simulation) -> dict[str, Any]:
    """The simulation as JSON data. Times over all requests are milliseconds, `kv_use` has seconds."""
    times = {"ttft_ms": simulation.ttft, "tpot_ms": simulation.tpot, "latency_ms": simulation.latency}
    return {
        "requests": simulation.num_requests,
        "too_long": simulation.num_failed,
        "replicas": simulation.num_replicas,
        "policy": simulation.policy,
        "seconds": simulation.seconds,
        **{
            name: {f"p{number}": round(1e3 * value, 3) for number, value in percentiles.items()}
            for name, percentiles in times.items()
        },
        "output_tok_s": simulation.output_tokens_per_second,
        "requests_per_s": simulation.requests_per_second,
        "goodput_per_s": simulation.goodput,
        "preemptions": simulation.num_preemptions,
        "prefix_hit_rate": simulation.prefix_hit_rate,
        "kv_use": [{"s": round(seconds, 3), "share": round(share, 4)} for seconds, share in simulation.kv_use],
        "steps": simulation.num_steps,
        "steps_at_once": simulation.num_skipped,
    }


class Progress:
    """Counts requests that have ended. It writes only to a terminal."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        """`total` is the number of requests; `stream` is None for no line."""
        self.total = total
        self._stream = stream if stream is not None and stream.isatty() else None
        self._started = self._shown = time.monotonic()
        self._has_line = False

    @classmethod
    def on_stderr(cls, total: int) -> Progress:
        """Progress that people see if they look at standard error."""
        return cls(total, sys.stderr)

    def show(self, done: int, now: float | None = None) -> None:
        """Write the line anew, unless that was just done. `now` is the virtual time, if all replicas share it."""
        seconds = time.monotonic()
        if self._stream is None or seconds - self._started < _SHOW_AFTER or seconds - self._shown < _SECONDS_BETWEEN:
            return
        self._shown, self._has_line = seconds, True
        rate = done / (seconds - self._started)
        left = f", {_minutes((self.total - done) / rate)} left" if rate and self.total else ""
        at = "" if now is None else f"at {now:,.1f} s: "
        share = f" of {self.total:,} ({done / self.total:.0%})" if self.total else ""
        self._stream.write(f"\r\x1b[Ksimulating, {at}{done:,}{share} requests done, {rate:,.0f} a second{left}")
        self._stream.flush()

    def end(self) -> None:
        """Remove the line."""
        if self._stream is not None and self._has_line:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d} min"
