"""A simulation as text and as JSON."""

from __future__ import annotations

from typing import Any

from shardline.planner.simulation.simulate import Simulation

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 50


def format_simulation(found: Simulation) -> str:
    """The simulation as text."""
    tokens = found.output_tokens_per_second
    lines = [
        f"simulated: {found.num_requests:,} requests in {found.seconds:,.1f} s on {found.num_replicas} "
        f"replica{'s' * (found.num_replicas != 1)} ({found.policy})",
        f"  TTFT s    {_row(found.ttft, 1, 3)}",
        f"  TPOT ms   {_row(found.tpot, 1e3, 2)}",
        f"  latency s {_row(found.latency, 1, 2)}",
        f"  {tokens:,.0f} output tokens/s, {found.requests_per_second:.2f} requests/s, goodput {found.goodput:.2f} "
        "requests/s within the limits",
        f"  {found.num_preemptions:,} preemptions, {found.prefix_hit_rate:.0%} of the prompts' tokens from the prefix "
        f"cache, {found.num_steps:,} steps",
        f"  KV cache in use, 0 to 100% over time: |{_bars([share for _, share in found.kv_use])}| at most "
        f"{max((share for _, share in found.kv_use), default=0.0):.0%}",
    ]
    if found.num_failed:
        lines.append(f"  left out, since --max-model-len is shorter: {found.num_failed:,} requests")
    return "\n".join(lines)


def _row(percentiles: dict[int, float], factor: float, digits: int) -> str:
    return "  ".join(f"p{number} {factor * value:.{digits}f}" for number, value in percentiles.items())


def _bars(shares: list[float]) -> str:
    """One character for each of at most `_WIDTH` spans of time."""
    size = -(-len(shares) // _WIDTH) or 1
    spans = [shares[start : start + size] for start in range(0, len(shares), size)]
    return "".join(_BARS[round(min(1.0, sum(span) / len(span)) * (len(_BARS) - 1))] for span in spans)


def simulation_json(found: Simulation) -> dict[str, Any]:
    """The simulation as JSON data. Times over all requests are milliseconds, `kv_use` has seconds."""
    times = {"ttft_ms": found.ttft, "tpot_ms": found.tpot, "latency_ms": found.latency}
    return {
        "requests": found.num_requests,
        "too_long": found.num_failed,
        "replicas": found.num_replicas,
        "policy": found.policy,
        "seconds": found.seconds,
        **{
            name: {f"p{number}": round(1e3 * value, 3) for number, value in percentiles.items()}
            for name, percentiles in times.items()
        },
        "output_tok_s": found.output_tokens_per_second,
        "requests_per_s": found.requests_per_second,
        "goodput_per_s": found.goodput,
        "preemptions": found.num_preemptions,
        "prefix_hit_rate": found.prefix_hit_rate,
        "kv_use": [{"s": round(seconds, 3), "share": round(share, 4)} for seconds, share in found.kv_use],
        "steps": found.num_steps,
        "steps_at_once": found.num_skipped,
    }
