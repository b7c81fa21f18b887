"""Fit the constants of step times to measured rows: least absolute errors of logarithms, with weak priors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.planner.rows import Row
from shardline.planner.timing import (
    CONSTANT_NAMES,
    Constants,
    LoopShape,
    LoopSteps,
    StepLoad,
    loop_prompt,
    loop_tpot,
)

Vector = NDArray[np.float64]

_PRIORS = {
    "memory": (0.75, 0.15),
    "cache": (0.6, 0.4),
    "compute": (0.5, 0.4),
    "link": (0.5, 0.5),
    "message": (8e-6, 0.7),
    "launch": (2e-6, 0.7),
    "step": (1e-3, 1.0),
    "request": (5e-6, 1.0),
}
"""Plausible value of each constant, and the width of its logarithm. They decide only where rows say nothing."""
_FIRST_TOKEN = {"first": 0.02, "queue": 1.0}
_START_WIDTH = 0.3
_START_WEIGHT = 30.0
"""Width around, and weight of, constants that more rows have given already."""
_PRIOR_WEIGHT = 3.0
_ITERATIONS = 20
_SMALLEST_ERROR = 0.05
_LARGEST_MOVE = 0.5
_FIRST_GRID = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08)
_QUEUE_GRID = tuple(float(value) for value in np.exp(np.linspace(-3, 3, 40)))


@dataclass(frozen=True)
class Sample:
    """A row, and the steps that it consists of."""

    row: Row
    steps: LoopSteps


class _Loads:
    """The loads of many samples as columns."""

    def __init__(self, loads: Sequence[StepLoad]) -> None:
        self.table = np.array(loads, dtype=np.float64)

    def seconds(self, values: dict[str, float]) -> Vector:
        """Time of each step; the same formula as `StepLoad.seconds`."""
        weights, cache, arithmetic, exchange, messages, launches, requests = self.table.T
        seconds: Vector = (
            np.maximum(weights / values["memory"], arithmetic / values["compute"])
            + cache / values["cache"]
            + exchange / values["link"]
            + messages * values["message"]
            + launches * values["launch"]
            + values["step"]
            + requests * values["request"]
        )
        return seconds


def fit_constants(samples: Sequence[Sample], start: Constants | None = None) -> Constants:
    """The constants of one engine, from samples with a TPOT, and from those of them with a TTFT.

    With `start`, which more samples have given (such as those of all engines), they change its values. Without, they
    start from what is plausible.
    """
    measured = [one for one in samples if one.row.tpot]
    if not measured:
        return start or Constants(**{name: value for name, (value, _) in _PRIORS.items()}, **_FIRST_TOKEN)
    loads = [_Loads([getattr(one.steps, kind) for one in measured]) for kind in ("decode", "prompt", "burst")]
    shape = LoopShape(*np.array([LoopShape.of(one.steps) for one in measured]).T)
    target = np.log([one.row.tpot or 1.0 for one in measured])
    names = list(_PRIORS)
    prior = np.log([value if start is None else getattr(start, name) for name, (value, _) in _PRIORS.items()])
    weight = _PRIOR_WEIGHT / np.array([width for _, width in _PRIORS.values()]) ** 2
    if start is not None:
        weight = np.full(len(names), _START_WEIGHT / _START_WIDTH**2)

    def predict(point: Vector) -> Vector:
        values = dict(zip(names, np.exp(point), strict=True))
        predicted: Vector = np.log(loop_tpot(shape, *(one.seconds(values) for one in loads)))
        return predicted

    point = prior.copy()
    for _ in range(_ITERATIONS):
        base = predict(point)
        error = target - base
        jacobian = np.stack([(predict(point + step) - base) / 1e-3 for step in 1e-3 * np.eye(len(names))], axis=1)
        # Weights of the inverse error make the sum of squares a sum of absolute values.
        scale = 1 / np.maximum(np.abs(error), _SMALLEST_ERROR)
        hessian = (jacobian * scale[:, None]).T @ jacobian + np.diag(weight)
        gradient = jacobian.T @ (scale * error) + weight * (prior - point)
        point = point + np.clip(np.linalg.solve(hessian, gradient), -_LARGEST_MOVE, _LARGEST_MOVE)
    values = {name: float(value) for name, value in zip(names, np.exp(point), strict=True)}
    alone, wait = loop_prompt(shape, *(one.seconds(values) for one in loads))
    first, queue = _fit_first_token(measured, alone, wait)
    constants = Constants(**values, first=first, queue=queue)
    assert set(values) | {"first", "queue"} == set(CONSTANT_NAMES)
    return constants


def _fit_first_token(samples: Sequence[Sample], alone: Vector, wait: Vector) -> tuple[float, float]:
    """(first, queue) with the smallest median error of TTFT. For `alone` and `wait` see `loop_prompt`."""
    has = np.array([one.row.ttft is not None for one in samples], dtype=bool)
    if not has.any():
        return _FIRST_TOKEN["first"], _FIRST_TOKEN["queue"]
    measured = np.array([one.row.ttft or 1.0 for one in samples])[has]
    best = min(
        (float(np.median(np.abs(np.log((first + alone[has] + queue * wait[has]) / measured)))), first, queue)
        for first in _FIRST_GRID
        for queue in _QUEUE_GRID
    )
    return best[1], best[2]
