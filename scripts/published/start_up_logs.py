"""Predicted KV memory against start-up logs, from a table in the form of kv_capacity.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_struct

from scripts.published.row_fields import number as field_number
from scripts.published.row_fields import plain_gpu, published_model, read_label
from scripts.published.rows import open_table
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import GIB, Gpu, known_gpus
from shardline.planner.layout import Demand, Layout
from shardline.planner.memory import fit
from shardline.planner.planned_model import PlannedModel

_MEMORY = "kv_gib_per_gpu"
_DEFAULT_UTILIZATION = 0.9
_PROMISED = 0.02
"""Half the width of the interval of predicted memory and tokens."""


@dataclass(frozen=True)
class LogError:
    """One log against its prediction; errors as fractions."""

    number: int
    model: str
    memory_error: float | None
    """Difference of the KV memory as a share of the GPU's memory. None: the log does not say how it was started."""
    token_error: float | None
    """Error of the number of tokens in the logged memory; None: the log has no such number."""


def validate_memory(path: Path, gpus: Mapping[str, Gpu]) -> tuple[list[LogError], list[tuple[int, str]]]:
    """(errors, (line, reason) of rows without a prediction) of a table of start-up logs.

    Raises:
        ValueError: the file has no rows.
    """
    found, missed = [], []
    with open_table(path) as stream:
        for number, row in enumerate(csv.DictReader(stream), 2):
            try:
                found.append(_error(number, row, gpus))
            except (ValueError, KeyError, TypeError) as error:
                missed.append((number, str(error)))
    if not found and not missed:
        raise ValueError(f"{path} has no rows below its header")
    return found, missed


def _error(number: int, row: Mapping[str, str], gpus: Mapping[str, Gpu]) -> LogError:
    model, tensor = published_model(row["model"] or ""), int(field_number(row.get("tp")) or 1)
    cluster = parse_cluster(f"{tensor}x{plain_gpu(row['gpu'] or '')}", gpus)
    total = _number(row.get("gpu_total_gib"))
    if total:
        cluster = replace(cluster, gpus=tuple(replace_struct(gpu, usable_gib=total) for gpu in cluster.gpus))
    length, utilization = field_number(row.get("max_model_len")), _number(row.get("util"))
    is_known = utilization is not None
    demand = Demand(int(length or model.spec.max_position_embeddings), utilization=utilization or _DEFAULT_UTILIZATION)
    label = read_label(model, row.get("weights_precision") or "")
    result = fit(model, Layout("vllm", tensor, weights=label), cluster, demand)
    stated, logged = _number(row.get(_MEMORY)), field_number(row.get("kv_tokens"))
    actual = result.kv_bytes if stated is None else stated * GIB
    memory = tokens = None
    if is_known and stated is not None:
        memory = abs(result.kv_bytes - actual) / cluster.smallest.usable_bytes
    if logged and (stated is not None or is_known):
        per_byte = result.kv_tokens / result.kv_bytes if result.kv_tokens else _tokens_per_byte(model, tensor, label)
        tokens = abs(per_byte * actual / logged - 1)
    return LogError(number, model.name, memory, tokens)


def _tokens_per_byte(model: PlannedModel, tensor: int, label: str) -> float:
    """Tokens in a byte of KV memory, from a machine on which the model fits in any case."""
    wide = parse_cluster(f"{tensor}xMI355X", known_gpus())
    length = min(8192, model.spec.max_position_embeddings)
    result = fit(model, Layout("vllm", tensor, weights=label), wide, Demand(length))
    return result.kv_tokens / result.kv_bytes


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def summarize_memory(found: Sequence[LogError], missed: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """The errors as fractions."""
    memory = [one.memory_error for one in found if one.memory_error is not None]
    tokens = [one.token_error for one in found if one.token_error is not None]
    return {
        "kv_memory": _figures(memory, len(missed)),
        "kv_tokens": _figures(tokens, len(missed)),
        "by": [
            {"model": one.model, "line": one.number, "kv_memory": one.memory_error, "kv_tokens": one.token_error}
            for one in found
        ],
        "skipped": [{"line": number, "why": why} for number, why in missed],
    }


def _figures(errors: Sequence[float], missed: int) -> dict[str, float | int]:
    if not errors:
        return {"n": 0, "missed": missed}
    return {
        "n": len(errors),
        "missed": missed,
        "median_ape": round(float(np.median(errors)), 4),
        "p90_ape": round(float(np.quantile(errors, 0.9)), 4),
        "coverage": round(sum(error <= _PROMISED for error in errors) / len(errors), 4),
    }


def format_memory(summary: Mapping[str, Any]) -> str:
    """The summary as text."""
    lines = [
        "KV memory: difference as a share of the GPU's memory. KV tokens: error, given the logged memory.",
        f"{'':52}{'KV memory':>12}{'KV tokens':>12}",
    ]
    for one in summary["by"]:
        shares = [f"{'-':>12}" if one[key] is None else f"{one[key]:>12.2%}" for key in ("kv_memory", "kv_tokens")]
        lines.append(f"{one['model']:52.52}{''.join(shares)}")
    for key in ("kv_memory", "kv_tokens"):
        figures = summary[key]
        if figures["n"]:
            lines.append(
                f"{key}: {figures['n']} rows, {figures['missed']} missed, median {figures['median_ape']:.2%}, 90th "
                f"percentile {figures['p90_ape']:.2%}"
            )
    return "\n".join(lines)
