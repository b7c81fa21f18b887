"""Predictions against published rows: each model and each GPU is held out in turn, and constants are fitted anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.published.fitting import Sample, fit_constants
from scripts.published.rows import Row, Skipped, Works, read_rows
from shardline.planner.calibration import Measured, calibrate
from shardline.planner.hardware import Gpu
from shardline.planner.timing import Constants, Latency, Timing, loop_latency, shipped_timing

QUANTITIES = ("tpot", "ttft", "output_tok_s")
_QUANTILES = (0.05, 0.95)
"""Quantiles of the errors of fitted rows. Between them lie about 80% of the rows that were held out."""
_LOADS = 3
"""Loads of a machine from which one may calibrate it, and the others be predicted."""
_ENOUGH_ROWS = 100
"""Rows from which a fit needs no other constants to start from."""
_HELD_OUT = ("model", "gpu")
_GROUPS = ("model", "gpu", "engine", "tier")
"""Properties of rows by which errors are shown."""


@dataclass(frozen=True)
class Error:
    """A prediction divided by its measurement, and the bounds of its interval divided by it."""

    row: Row
    quantity: str
    ratio: float
    is_covered: bool


@dataclass(frozen=True)
class Validation:
    """The errors of a file's rows, with the constants that were fitted for them."""

    errors: tuple[Error, ...]
    skipped: tuple[Skipped, ...]
    refitted: Mapping[str, Constants]
    """"engine without MODEL" -> constants."""
    calibrated: Mapping[str, Sequence[float]]
    """See `calibrated_ratios`."""


def collect_samples(rows: Sequence[Row], gpus: Mapping[str, Gpu]) -> tuple[list[Sample], list[Skipped]]:
    """The steps of every row with a possible layout. Copies are left out."""
    works, samples, skipped = Works(gpus), [], []
    seen: set[object] = set()
    for row in rows:
        if row.key in seen and row.tpot is not None:
            continue
        seen.add(row.key)
        try:
            samples.append(Sample(row, works.steps(row)))
        except ValueError as error:
            skipped.append(Skipped(row.number, str(error), True))
    return samples, skipped


def validate(path: Path, gpus: Mapping[str, Gpu]) -> Validation:
    """Predict every row of a file, by constants fitted to rows of other models and of other GPUs.

    A row has two predictions: one without its model's rows, and one without its GPU's.

    Raises:
        ValueError: the file cannot be read.
    """
    rows, unread = read_rows(path)
    samples, skipped = collect_samples(rows, gpus)
    errors: list[Error] = []
    refitted: dict[str, Constants] = {}
    for attribute in _HELD_OUT:
        for value in sorted({getattr(one.row, attribute) for one in samples}):
            held = [one for one in samples if getattr(one.row, attribute) == value]
            others = [one for one in samples if getattr(one.row, attribute) != value]
            is_much = len(others) >= _ENOUGH_ROWS
            pooled = fit_constants(others) if is_much else None
            for engine in sorted({one.row.engine for one in held}):
                own = [one for one in others if one.row.engine == engine]
                shipped = shipped_timing()[engine]
                constants = fit_constants(own, pooled or shipped.constants)
                refitted[f"{engine} without {value}"] = constants
                spread = spread_of(own or others, constants) if is_much else shipped.spread
                for sample in held:
                    if sample.row.engine == engine:
                        errors += _errors(sample, loop_latency(sample.steps, constants), spread)
    calibrated = calibrated_ratios(samples, shipped_timing())
    return Validation(tuple(errors), (*unread, *skipped), refitted, calibrated)


def _errors(sample: Sample, latency: Latency, spread: Mapping[str, tuple[float, float]]) -> list[Error]:
    row, found = sample.row, []
    for quantity, value, actual in _pairs(row, latency, sample):
        low, high = spread[quantity]
        found.append(Error(row, quantity, value / actual, low * value <= actual <= high * value))
    return found


def _pairs(row: Row, latency: Latency, sample: Sample) -> list[tuple[str, float, float]]:
    """(quantity, predicted, measured) of what a row states."""
    speed = latency.output_tokens_per_second * row.layout.data
    pairs = (
        ("tpot", latency.tpot, row.tpot),
        ("ttft", latency.ttft, row.ttft),
        ("output_tok_s", speed, row.output_tok_s),
    )
    return [(quantity, value, actual) for quantity, value, actual in pairs if actual]


def spread_of(samples: Sequence[Sample], constants: Constants) -> dict[str, tuple[float, float]]:
    """For each quantity, the factors from a prediction to the bounds of its 80% interval; see `_QUANTILES`."""
    ratios: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES}
    for sample in samples:
        for quantity, value, actual in _pairs(sample.row, loop_latency(sample.steps, constants), sample):
            ratios[quantity].append(actual / value)
    return {
        quantity: (float(np.quantile(found, _QUANTILES[0])), float(np.quantile(found, _QUANTILES[1])))
        if found
        else (0.5, 2.0)
        for quantity, found in ratios.items()
    }


def calibrated_ratios(samples: Sequence[Sample], timing: Mapping[str, Timing]) -> dict[str, list[float]]:
    """Measured values divided by predicted ones, on machines that were calibrated at another load.

    A machine is a model in one layout on one kind of GPU with requests of one length. Its middle load calibrates it, if
    there are at least three, and the others are predicted.
    """
    machines: dict[object, list[Sample]] = {}
    for sample in samples:
        row = sample.row
        if row.tpot and row.running:
            key = (row.engine, row.model, row.gpu, row.layout, row.input_len, row.output_len)
            machines.setdefault(key, []).append(sample)
    ratios: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES}
    for own in machines.values():
        own.sort(key=lambda one: one.row.running or 0.0)
        if len(own) < _LOADS:
            continue
        middle = own.pop(len(own) // 2)
        row = middle.row
        measured = Measured(row.running or 1.0, row.input_len, row.output_len, row.ttft, row.tpot or 1.0)
        constants = calibrate(timing[row.engine], [(middle.steps, measured)]).constants
        for sample in own:
            for quantity, value, actual in _pairs(sample.row, loop_latency(sample.steps, constants), sample):
                ratios[quantity].append(actual / value)
    return ratios


def fit_timing(path: Path, gpus: Mapping[str, Gpu]) -> dict[str, Any]:
    """The content of timing.json: constants of each engine from all rows of a file, and the errors left.

    Raises:
        ValueError: the file cannot be read.
    """
    samples, _ = collect_samples(read_rows(path)[0], gpus)
    engines: dict[str, Any] = {}
    pooled = fit_constants(samples)
    for engine in sorted({one.row.engine for one in samples}):
        own = [one for one in samples if one.row.engine == engine]
        constants = fit_constants(own, pooled)
        engines[engine] = {
            "rows": len(own),
            "constants": {name: float(f"{value:.4g}") for name, value in asdict(constants).items()},
            "spread": {
                name: [round(low, 3), round(high, 3)] for name, (low, high) in spread_of(own, constants).items()
            },
        }
    plain = {name: Timing(Constants(**one["constants"]), one["spread"]) for name, one in engines.items()}
    calibrated = {
        quantity: [round(float(np.quantile(found, share)), 3) for share in (0.1, 0.9)]
        for quantity, found in calibrated_ratios(samples, plain).items()
    }
    return {"source": path.name, "calibrated": calibrated, "engines": engines}


def summarize(validation: Validation) -> dict[str, Any]:
    """The errors as fractions."""
    errors = validation.errors
    missed = sum(one.names_layout for one in validation.skipped)
    summary: dict[str, Any] = {quantity: _figures(errors, quantity, missed) for quantity in QUANTITIES}
    summary["calibrated"] = {
        quantity: _shares([abs(1 / ratio - 1) for ratio in ratios])
        for quantity, ratios in validation.calibrated.items()
    }
    summary["by"] = []
    for kind in _GROUPS:
        for value in sorted({getattr(one.row, kind) for one in errors}):
            own = [one for one in errors if getattr(one.row, kind) == value]
            summary["by"].append({kind: value, **{quantity: _figures(own, quantity, 0) for quantity in QUANTITIES}})
    summary["skipped"] = [{"line": one.number, "why": one.why} for one in validation.skipped]
    summary["refitted"] = {name: asdict(constants) for name, constants in validation.refitted.items()}
    return summary


def _figures(errors: Sequence[Error], quantity: str, missed: int) -> dict[str, float | int]:
    own = [one for one in errors if one.quantity == quantity]
    if not own:
        return {"n": 0, "missed": missed}
    return {
        "missed": missed,
        **_shares([abs(one.ratio - 1) for one in own]),
        "coverage": round(sum(one.is_covered for one in own) / len(own), 4),
    }


def _shares(errors: Sequence[float]) -> dict[str, float | int]:
    """Number, median and 90th percentile of errors."""
    if not errors:
        return {"n": 0}
    median, high = (round(float(np.quantile(errors, share)), 4) for share in (0.5, 0.9))
    return {"n": len(errors), "median_ape": median, "p90_ape": high}


def format_summary(summary: Mapping[str, Any]) -> str:
    """The summary as text."""
    head = f"{'':44}{'rows':>6}{'missed':>8}{'median':>9}{'p90':>8}{'in 80%':>8}"
    lines = ["Each model and each GPU held out in turn; errors of what was not fitted.", head]
    for quantity in QUANTITIES:
        lines.append(_line(quantity, summary[quantity]))
    for quantity, figures in summary["calibrated"].items():
        lines.append(_line(f"{quantity}, calibrated at another load", figures))
    for entry in summary["by"]:
        name = next(value for key, value in entry.items() if key not in QUANTITIES)
        lines += [_line(f"{quantity} {name}", entry[quantity]) for quantity in QUANTITIES if entry[quantity]["n"]]
    return "\n".join(lines)


def _line(name: str, figures: Mapping[str, Any]) -> str:
    missed = figures.get("missed", "")
    if not figures["n"]:
        return f"{name:44}{0:>6}{missed:>8}"
    coverage = f"{figures['coverage']:>8.0%}" if "coverage" in figures else ""
    shares = f"{figures['median_ape']:>9.1%}{figures['p90_ape']:>8.0%}{coverage}"
    return f"{name:44.44}{figures['n']:>6}{missed:>8}{shares}"
