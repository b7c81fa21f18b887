"""Make predictions agree with a machine that was measured: from a benchmark, or from a start-up log."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace as replace_struct
from numpy.typing import NDArray

from shardline.planner.cluster import Cluster
from shardline.planner.hardware import GIB
from shardline.planner.layout import Layout
from shardline.planner.memory import bits_label
from shardline.planner.search import Option, Plan, evaluate, search
from shardline.planner.speed import layout_work, step_limits
from shardline.planner.timing import (
    USUAL_ROUNDS,
    Constants,
    Load,
    LoopSteps,
    Timing,
    loop_first_token,
    loop_latency,
    loop_steps,
)

Vector = NDArray[np.float64]

_LOG_MEMORY = re.compile(r"Available KV cache memory: ([0-9]+(?:\.[0-9]+)?) GiB")
_LOG_TOKENS = re.compile(r"KV cache size: ([0-9][0-9,]*) tokens")
_WIDTHS = {
    "memory": 0.3, "cache": 0.5, "compute": 0.5, "link": 1.0, "message": 0.3, "launch": 0.3,
    "step": 1.0, "request": 0.3,
}  # fmt: skip
"""How far each constant may plausibly be from the shipped one on a machine: widths of its logarithm."""
_ROUNDS = 24
_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Parts of a move that are tried, until one brings the predictions nearer."""
_ERROR = 0.02
"""Error of a measured TPOT, as a width of its logarithm."""


def calibrated(plan: Plan, path: Path) -> Plan:
    """The same plan for the machine that a benchmark's result or a start-up log shows.

    Raises:
        ValueError: the file cannot be read, or the layout that can have been measured does not fit.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"--calibrate {path} cannot be read: {error}") from None
    cluster, timing = plan.cluster, plan.timing
    if text.lstrip().startswith(("{", "[")):
        results = read_benchmark(path, text)
        timing = calibrated_timing(plan, measured_layout(plan), results)
    else:
        cluster = _with_log(plan, path, text)
    engine = plan.options[0].layout.engine
    return search(plan.model, cluster, plan.demand, plan.goal, engine, plan.fixed, timing)


class Measured(NamedTuple):
    """What a benchmark measured, in seconds."""

    running: float
    input_len: float
    output_len: float
    ttft: float | None
    tpot: float


def read_benchmark(path: Path, text: str) -> list[Measured]:
    """The loads and latencies in the `text` of a file.

    It is a result of `shardline bench throughput --json`, or of `bench serve`, ours or vLLM's.
    The file has one result, or a list of them.

    Raises:
        ValueError: it cannot be read, or has another form.
    """
    try:
        data = json.loads(text)
        results = [_measured(result) for result in (data if isinstance(data, list) else [data])]
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        why = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"--calibrate {path}: no result of a benchmark: {why}") from None
    if not results:
        raise ValueError(f"--calibrate {path}: no result of a benchmark: the list is empty")
    return results


def _measured(result: Mapping[str, Any]) -> Measured:
    if not isinstance(result, dict):
        raise ValueError("it must be an object, or a list of them")
    if "prompt_tokens" in result:  # of `bench throughput`
        count = int(result["num_prompts"])
        ttft, tpot, seconds = result["ttft"]["50"], result["tpot"]["50"], result.get("seconds")
        lengths = result["prompt_tokens"] / count, result["generation_tokens"] / count
    else:
        count = int(result.get("completed") or result["num_prompts"])
        ttft = result["median_ttft_ms"] / 1e3 if result.get("median_ttft_ms") else None
        tpot, seconds = result["median_tpot_ms"] / 1e3, result.get("duration")
        lengths = result["total_input_tokens"] / count, result["total_output_tokens"] / count
    running = result.get("max_concurrency") or count
    if not result.get("max_concurrency") and seconds:
        # Little's law: so many ran at once on average.
        running = min(count, count * ((ttft or 0.0) + tpot * (lengths[1] - 1)) / seconds)
    if not (tpot > 0 and running > 0 and min(lengths) > 0):
        raise ValueError("times, lengths and requests must be above zero")
    return Measured(max(1.0, running), *lengths, ttft, tpot)


def _with_log(plan: Plan, path: Path, text: str) -> Cluster:
    """The cluster with the memory that the `text` of a start-up log of the measured layout shows.

    Raises:
        ValueError: the log does not state it, or a GPU has less memory than that.
    """
    memory, tokens = _LOG_MEMORY.search(text), _LOG_TOKENS.search(text)
    if memory is None and tokens is None:
        raise ValueError(f"--calibrate {path}: the log has no line 'GPU KV cache size: N tokens'")
    fitted, cluster = measured_layout(plan).fit, plan.cluster
    if memory is not None:
        actual = float(memory.group(1)) * GIB
    else:
        assert tokens is not None
        actual = int(tokens.group(1).replace(",", "")) * fitted.kv_bytes / fitted.kv_tokens
    if actual > cluster.smallest.usable_bytes:
        raise ValueError(
            f"--calibrate {path}: a KV cache of {actual / GIB:,.1f} GiB is larger than the memory of a GPU, "
            f"{cluster.smallest.usable_gib:g} GiB; the log is of another machine"
        )
    more = (actual - fitted.kv_bytes) / plan.demand.utilization / GIB
    gpus = tuple(replace_struct(gpu, usable_gib=gpu.usable_gib + more) for gpu in cluster.gpus)
    return dataclasses.replace(cluster, gpus=gpus)


def calibrate(timing: Timing, steps: Sequence[tuple[LoopSteps, Measured]]) -> Timing:
    """Constants with which the measured steps take the measured time, as near to the given ones as possible.

    Every constant moves by its share of the doubt: those with the largest effect and the widest plausible range move
    most. If one request runs, or all start together, none waits for another's prompt, so TTFT counts too: it is the
    time of the prompts. The intervals become those of machines that were measured at another load.
    """
    names = list(_WIDTHS)
    widths = np.array(list(_WIDTHS.values()))
    start = np.log([getattr(timing.constants, name) for name in names])
    unqueued = [
        (loop, measured.ttft)
        for loop, measured in steps
        if measured.ttft is not None and (measured.running <= 1 or _start_together(loop.load))
    ]
    target = np.log([*(measured.tpot for _, measured in steps), *(ttft for _, ttft in unqueued)])

    def constants(point: Vector) -> Constants:
        values = dict(zip(names, map(float, np.exp(point)), strict=True))
        return dataclasses.replace(timing.constants, **values)

    def predict(point: Vector) -> Any:
        moved_constants = constants(point)
        prompts = (loop_first_token(loop, moved_constants).seconds(moved_constants) for loop, _ in unqueued)
        return np.log([*(loop_latency(loop, moved_constants).tpot for loop, _ in steps), *prompts])

    def misfit(point: Vector) -> float:
        moved, missed = (point - start) / widths, (target - predict(point)) / _ERROR
        return float(moved @ moved + missed @ missed)

    point, worst = start, misfit(start)
    for _ in range(_ROUNDS):
        base = predict(point)
        jacobian = np.stack([(predict(point + move) - base) / 1e-4 for move in 1e-4 * np.eye(len(names))], axis=1)
        error = target - base + jacobian @ (point - start)
        gain = (widths**2)[:, None] * jacobian.T
        system = jacobian @ gain + _ERROR**2 * np.eye(len(target))
        move = start + gain @ np.linalg.solve(system, error) - point
        # Far from the measurements the model bends too much for whole moves.
        shares = (share for share in _SHARES if misfit(point + share * move) < worst)
        share = next(shares, 0.0)
        if not share:
            break
        point = point + share * move
        worst = misfit(point)
    final = constants(point)
    return Timing(_with_first_token(final, steps), timing.calibrated or timing.spread, timing.calibrated)


def _start_together(load: Load) -> bool:
    """Whether all requests start together, and their prompts join the same steps."""
    return load.in_phase and not load.prefill_first


def _with_first_token(constants: Constants, steps: Sequence[tuple[LoopSteps, Measured]]) -> Constants:
    """The constants with the wait for steps and for other prompts that the measured TTFT show, if there are any."""
    shares = []
    for loop, measured in steps:
        parts = loop_first_token(loop, constants)
        total, fixed = float(parts.seconds(constants)), constants.first + float(parts.alone)
        is_queued = loop.load.running > 1 and not _start_together(loop.load)
        if measured.ttft is not None and is_queued and total > fixed:
            shares.append((measured.ttft - fixed) / (total - fixed))
    if not shares:
        return constants
    share, start = max(0.0, float(np.median(shares))), 1 / USUAL_ROUNDS
    return dataclasses.replace(
        constants,
        shown=share * constants.shown,
        # With the start of a benchmark, which is no constant, it is the whole share of prompts that come together.
        together=share * (start + constants.together) - start,
        queue=share * constants.queue,
    )


def measured_layout(plan: Plan) -> Option:
    """The layout that was measured: the one that `serve` starts with the given flags.

    Raises:
        ValueError: it does not fit, so it cannot have been measured.
    """
    fixed = plan.fixed
    layout = Layout(
        plan.options[0].layout.engine,
        fixed.tensor or 1,
        fixed.pipeline or 1,
        fixed.data or 1,
        bool(fixed.whole_experts),
        fixed.weights or bits_label(plan.model),
        fixed.kv or "auto",
        numerics=fixed.numerics or "exact",
    )
    option = evaluate(plan.model, layout, plan.cluster, plan.demand, plan.timing)
    if not option.fits:
        raise ValueError(
            f"--calibrate needs flags that name the layout that was measured, such as -tp 4; {layout} does not fit: "
            f"{option.fit.why_not}"
        )
    return option


def calibrated_timing(plan: Plan, best: Option, measured: Sequence[Measured]) -> dict[str, Timing]:
    """The timing with which the layout `best` has the measured latencies."""
    layout = best.layout
    used = plan.cluster.part(layout.num_gpus)
    work = layout_work(plan.model, layout, best.fit)
    _, chunk = step_limits(layout, plan.demand)
    steps = [
        (
            loop_steps(
                work,
                used,
                Load(
                    max(1.0, measurement.running / layout.data),
                    measurement.input_len,
                    measurement.output_len,
                    chunk,
                    lockstep=layout.lockstep,
                ),
                layout.pipeline,
            ),
            measurement,
        )
        for measurement in measured
    ]
    return {**plan.timing, layout.engine: calibrate(plan.timing[layout.engine], steps)}
