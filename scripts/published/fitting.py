"""Fit the constants of step times to measured rows: least absolute errors of logarithms, with weak priors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.published.rows import Row
from shardline.planner.timing import Constants, Load, LoopSteps, StepLoad, loop_first_token, loop_tpot

Vector = NDArray[np.float64]

_STEP_PRIORS = {
    "memory": (0.75, 0.15),
    "cache": (0.6, 0.4),
    "compute": (0.5, 0.4),
    "link": (0.5, 0.5),
    "message": (8e-6, 0.7),
    "launch": (4e-6, 0.7),
    "step": (1e-3, 1.0),
    "request": (5e-6, 1.0),
}
"""Constants that latencies give: the plausible value of each, and the width of its logarithm.

They decide only where rows say nothing.
"""
_RUN_PRIORS = {"attention": (0.5, 0.5), "expanded": (0.5, 0.5), "saturated": (1.0, 0.3)}
"""The same for constants that show in saturated runs with long prompts. They are fitted after the others."""
_FIRST_TOKEN_PRIORS = {"first": (0.02, 1.0), "shown": (3.0, 1.0), "together": (0.1, 1.0), "queue": (0.5, 1.0)}
"""The same for the time to the first token. They are fitted last."""
_START_WIDTH = 0.3
_START_WEIGHT = 30.0
"""Width around, and weight of, constants that more rows have given already."""
_PRIOR_WEIGHT = 3.0
_ITERATIONS = 12
_SMALLEST_ERROR = 0.05
_LARGEST_MOVE = 0.5
_OUTLIER = 0.25


@dataclass(frozen=True)
class Sample:
    """A row, and the steps that it consists of."""

    row: Row
    steps: LoopSteps


def _columns(samples: Sequence[Sample]) -> LoopSteps:
    """The steps of many samples, with an array for each number."""

    def column(name: str) -> Any:
        return np.array([getattr(one.steps, name) for one in samples], dtype=np.float64).T

    return LoopSteps(
        *(StepLoad(*column(kind)) for kind in ("decode", "prompt", "burst")),
        *map(column, ("chunks", "bursts", "prompt_steps", "stages")),
        Load(*column("load")),
    )


def _ttft(loops: LoopSteps, constants: Constants) -> Vector:
    return np.asarray(loop_first_token(loops, constants).seconds(constants), dtype=np.float64)


def fit_constants(samples: Sequence[Sample], start: Constants | None = None) -> Constants:
    """The constants of one engine, from samples with a TPOT, from those of saturated runs, and from TTFT.

    With `start`, which more samples have given (such as those of all engines), they change its values. Without, they
    start from what is plausible.
    """
    found, is_known = start or _plausible(), start is not None
    latencies = [one for one in samples if one.row.tpot]
    both = [one for one in samples if one.row.tpot or _saturated_tpot(one)]
    first = [one for one in latencies if one.row.ttft]
    found = _fit(_STEP_PRIORS, latencies, [one.row.tpot or 1.0 for one in latencies], loop_tpot, found, is_known)
    found = _fit(
        _RUN_PRIORS, both, [one.row.tpot or _saturated_tpot(one) or 1.0 for one in both], loop_tpot, found, is_known
    )
    return _fit(_FIRST_TOKEN_PRIORS, first, [one.row.ttft or 1.0 for one in first], _ttft, found, False, True)


def _plausible() -> Constants:
    priors = {**_STEP_PRIORS, **_RUN_PRIORS, **_FIRST_TOKEN_PRIORS}
    return Constants(**{name: value for name, (value, _) in priors.items()})


def _saturated_tpot(sample: Sample) -> float | None:
    """Mean time of a token of a request in a saturated run, of which tokens per second were measured."""
    row = sample.row
    if not sample.steps.load.saturated or not row.output_tok_s:
        return None
    return sample.steps.load.running * row.layout.data / row.output_tok_s


def _fit(
    priors: Mapping[str, tuple[float, float]],
    samples: Sequence[Sample],
    measured: Sequence[float],
    predict: Callable[[LoopSteps, Constants], Vector],
    start: Constants,
    is_known: bool,
    has_outliers: bool = False,
) -> Constants:
    """`start` with the constants of `priors` fitted, so that `predict` gives the `measured` seconds of the samples.

    With `is_known`, other rows have given their start.
    """
    if not samples:
        return start
    table, names = _columns(samples), list(priors)
    target = np.log(measured)
    prior = np.log([getattr(start, name) for name in names])
    weight = _PRIOR_WEIGHT / np.array([width for _, width in priors.values()]) ** 2
    if is_known:
        weight = np.full(len(names), _START_WEIGHT / _START_WIDTH**2)

    def at(point: Vector) -> Constants:
        return replace(start, **dict(zip(names, map(float, np.exp(point)), strict=True)))

    point = prior.copy()
    for _ in range(_ITERATIONS):
        base = np.log(predict(table, at(point)))
        error = target - base
        moved = [np.log(predict(table, at(point + move))) for move in 1e-3 * np.eye(len(names))]
        jacobian = (np.stack(moved, axis=1) - base[:, None]) / 1e-3
        # Weights of the inverse error make the sum of squares a sum of absolute values.
        scale = 1 / np.maximum(np.abs(error), _SMALLEST_ERROR)
        if has_outliers:
            scale = 1 / (np.square(error) / _OUTLIER + _OUTLIER)
        hessian = (jacobian * scale[:, None]).T @ jacobian + np.diag(weight)
        gradient = jacobian.T @ (scale * error) + weight * (prior - point)
        point = point + np.clip(np.linalg.solve(hessian, gradient), -_LARGEST_MOVE, _LARGEST_MOVE)
    return at(point)
