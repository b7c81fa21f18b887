"""What a simulation says: a line on the terminal while it runs, and what became of the workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 50
_SHOW_AFTER = 2.0
"""Seconds. A shorter simulation needs no line."""


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


def progress_bar(total: int, stream: TextIO | None = None) -> tqdm[Any]:
    """Counts requests that have ended, on a terminal only. `stream`: None: standard error."""
    return tqdm(
        total=total, desc="simulating", unit=" requests", file=stream, disable=None, delay=_SHOW_AFTER, leave=False
    )


def show_progress(bar: tqdm[Any], done: int, now: float | None = None) -> None:
    """Note how many requests have ended. `now` is the virtual time, if all replicas share it."""
    if now is not None:
        bar.set_postfix_str(f"at {now:,.1f} s", refresh=False)
    bar.update(done - bar.n)
