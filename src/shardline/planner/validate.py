"""Predictions against a user's own measurements: a CSV file, each row of which the shipped constants predict."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from shardline.planner.catalog import find_model
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import GIB, Gpu
from shardline.planner.layout import Demand, Layout, usual_length
from shardline.planner.memory import bits_label
from shardline.planner.search import evaluate

QUANTITIES = ("ttft_ms", "tpot_ms", "output_tok_s", "kv_gib", "kv_tokens")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured deployment; the fields are the columns of the file, and docs/planner.md describes them."""

    model: str
    gpus: str
    link: str | None = None
    inter_node: str | None = None
    engine: Literal["shardline", "vllm"] = "vllm"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    weights: str | None = None
    kv: str = "auto"
    max_model_len: int | None = None
    utilization: float = 0.9
    input_len: int = 1024
    output_len: int = 128
    running: int | None = None
    rate: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    output_tok_s: float | None = None
    kv_gib: float | None = None
    kv_tokens: float | None = None
    notes: str = ""


@dataclass(frozen=True)
class Error:
    """A prediction divided by its measurement."""

    line: int
    model: str
    quantity: str
    ratio: float
    is_covered: bool | None
    """Whether the measurement lies in the 80% interval; None: memory is predicted without one."""


def validate(path: Path, gpus: Mapping[str, Gpu]) -> tuple[list[Error], dict[int, str]]:
    """The errors of a file's rows, and why lines without a prediction have none, by their number.

    Raises:
        ValueError: the file cannot be read, has no rows, or has a column that is not known.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            table = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    columns = table[0].keys() if table else {}
    if not {"model", "gpus"} <= set(columns):
        raise ValueError(f"{path} must be a table with a header, rows, and the columns model and gpus")
    unknown = [name for name in columns if name not in Row.__struct_fields__]
    if unknown:
        raise ValueError(f"{path}: unknown column {unknown[0]!r}; known are {', '.join(Row.__struct_fields__)}")
    errors, skipped = [], {}
    for line, cells in enumerate(table, 2):
        try:
            row = msgspec.convert({name: cell for name, cell in cells.items() if cell}, Row, strict=False)
            errors += _errors(line, row, gpus)
        except (ValueError, msgspec.ValidationError) as error:
            skipped[line] = str(error)
    return errors, skipped


def _errors(line: int, row: Row, gpus: Mapping[str, Gpu]) -> list[Error]:
    """The errors of the quantities that a row states.

    Raises:
        ValueError: the row describes nothing that starts.
    """
    model, cluster = find_model(row.model), parse_cluster(row.gpus, gpus, row.link, row.inter_node)
    weights = row.weights or bits_label(model)
    layout = Layout(row.engine, row.tp, row.pp, row.dp, row.ep, weights, row.kv)
    positions, needed = model.spec.max_position_embeddings, row.input_len + row.output_len
    demand = Demand(
        row.max_model_len or usual_length(positions, needed),
        row.input_len,
        row.output_len,
        rate=row.rate,
        running=row.running,
        utilization=row.utilization,
    )
    option = evaluate(model, layout, cluster, demand)
    if option.speed is None:
        raise ValueError(f"{layout}: {option.fit.why_not}")
    intervals = {name: getattr(option.speed, name.removesuffix("_ms")) for name in QUANTITIES[:3]}
    memory = {"kv_gib": option.fit.kv_bytes / GIB, "kv_tokens": float(option.fit.kv_tokens)}
    errors = []
    for name in QUANTITIES:
        measured = getattr(row, name)
        if measured is None:
            continue
        if not measured > 0:
            raise ValueError(f"{name} must be above zero, got {measured:g}")
        if name in memory:
            errors.append(Error(line, row.model, name, memory[name] / measured, None))
            continue
        scale = 1e3 if name.endswith("_ms") else 1.0
        low, middle, high = (scale * bound for bound in intervals[name])
        errors.append(Error(line, row.model, name, middle / measured, low <= measured <= high))
    return errors


def summarize(errors: Sequence[Error], skipped: Mapping[int, str]) -> dict[str, Any]:
    """The errors as JSON data: fractions, over all rows and for each one."""
    rows: dict[int, dict[str, Any]] = {}
    for error in errors:
        rows.setdefault(error.line, {"line": error.line, "model": error.model})[error.quantity] = round(
            error.ratio - 1, 4
        )
    summary: dict[str, Any] = {"rows": list(rows.values())}
    for quantity in QUANTITIES:
        own = [error for error in errors if error.quantity == quantity]
        summary[quantity] = {"n": len(own)}
        if own:
            median, high = np.quantile([abs(error.ratio - 1) for error in own], (0.5, 0.9))
            summary[quantity] |= {"median_ape": round(float(median), 4), "p90_ape": round(float(high), 4)}
            if own[0].is_covered is not None:
                summary[quantity]["coverage"] = round(sum(bool(error.is_covered) for error in own) / len(own), 4)
    return {**summary, "skipped": [{"line": line, "why": why} for line, why in skipped.items()]}


def format_summary(summary: Mapping[str, Any]) -> str:
    lines = [f"{'line':>5} {'predicted / measured - 1':40.40}" + "".join(f"{name:>14}" for name in QUANTITIES)]
    for row in summary["rows"]:
        cells = (f"{row[name]:>+14.1%}" if name in row else f"{'-':>14}" for name in QUANTITIES)
        lines.append(f"{row['line']:>5} {row['model']:40.40}{''.join(cells)}")
    for title, key in (
        ("median error", "median_ape"),
        ("90th percentile", "p90_ape"),
        ("in the 80% interval", "coverage"),
    ):
        cells = (f"{summary[name][key]:>14.1%}" if key in summary[name] else f"{'-':>14}" for name in QUANTITIES)
        lines.append(f"{'':5} {title:40}{''.join(cells)}")
    lines += [f"no prediction of line {row['line']}: {row['why']}" for row in summary["skipped"]]
    return "\n".join(lines)
