"""Several runs as one result, with confidence intervals; and whether two results differ by more than their noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for a two-sided 95% interval, by degrees of freedom from 1."""

COMPARED = (
    ("request_throughput", "requests/s", True),
    ("output_throughput", "output tokens/s", True),
    ("total_token_throughput", "tokens/s", True),
    ("request_goodput", "good requests/s", True),
    *((f"{kind}_{name}_ms", f"{kind} {name.replace('_', ' ')} (ms)", False)
      for name in ("ttft", "tpot", "itl", "e2el", "ttft_from_intended", "e2el_from_intended")
      for kind in ("mean", "median", "p99")),
)  # fmt: skip
"""Key, label, and whether more is better."""


def student_t(freedom: float) -> float:
    """Student's t for a two-sided 95% interval. Fractions are rounded down, which makes the interval wider."""
    return _T_95[max(1, int(freedom)) - 1] if freedom < len(_T_95) + 1 else 1.96


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95% confidence interval of the mean; None: one value has none."""
    if len(values) < 2:
        return None
    return student_t(len(values) - 1) * math.sqrt(_variance(values) / len(values))


def merge_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result: the last run's, but numbers that vary are means over the runs.

    `confidence` has half of the 95% interval of each mean, `runs` the numbers of every run.
    """
    numbers = [
        {key: value for key, value in run.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
        for run in runs
    ]
    keys = [key for key in numbers[0] if all(key in run for run in numbers)]
    columns = {key: [run[key] for run in numbers] for key in keys}
    means = {key: sum(values) / len(values) for key, values in columns.items() if len(set(values)) > 1}
    failures: dict[str, int] = {}
    for run in runs:
        for cause, count in run.get("failures", {}).items():
            failures[cause] = failures.get(cause, 0) + count
    return {
        **runs[-1],
        **means,
        "failures": failures,
        "client_limited": any(run["client_limited"] for run in runs),
        "num_runs": len(runs),
        "confidence": {key: half_width(values) for key, values in columns.items()},
        "runs": numbers,
    }


def confidence_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The mean and the interval of the main figures."""
    title = f" Mean of {result['num_runs']} Runs, 95% Confidence "
    yield f"{title:=^50}"
    for key, label, _ in COMPARED:
        width = result["confidence"].get(key)
        if width is not None and result.get(key) is not None:
            yield f"{label[0].upper() + label[1:] + ':':<40} {result[key]:.2f} ± {width:.2f}"
    yield "=" * 50


def compare_lines(before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str]) -> Iterator[str]:
    """The ratios of two results, and whether each exceeds the noise of the runs."""
    yield f"A: {names[0]} ({before.get('num_runs', 1)} runs)   B: {names[1]} ({after.get('num_runs', 1)} runs)"
    yield f"{'':<30} {'A':>12} {'B':>12} {'B / A':>8}  verdict"
    for key, label, more_is_better in COMPARED:
        old, new = before.get(key), after.get(key)
        if not isinstance(old, (int, float)) or not isinstance(new, (int, float)):
            continue
        ratio = f"{new / old:8.3f}" if old else f"{'-':>8}"
        yield f"{label:<30} {old:>12.2f} {new:>12.2f} {ratio}  {_verdict(before, after, key, more_is_better)}"


def _verdict(before: Mapping[str, Any], after: Mapping[str, Any], key: str, more_is_better: bool) -> str:
    """What the runs say about the difference (Welch's test at 95%)."""
    old, new = ([run[key] for run in result.get("runs", ()) if key in run] for result in (before, after))
    if len(old) < 2 or len(new) < 2:
        return "one run only: noise unknown (use --num-runs)"
    errors = [_variance(values) / len(values) for values in (old, new)]
    difference = sum(new) / len(new) - sum(old) / len(old)
    if sum(errors) == 0:
        return "same" if difference == 0 else ("better" if (difference > 0) == more_is_better else "worse")
    parts = zip(errors, (len(old), len(new)), strict=True)
    freedom = sum(errors) ** 2 / sum(error**2 / (count - 1) for error, count in parts)
    if abs(difference) <= student_t(freedom) * math.sqrt(sum(errors)):
        return "within the noise"
    return "better" if (difference > 0) == more_is_better else "worse"


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
