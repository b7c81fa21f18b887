"""What a watermark does to one row of logits in host memory.

Only sums, products and quotients of fp64 numbers are used, one after another, so that hosts with unlike processors get
equal bits: no library's exp or log, and no sum in an order that depends on vectors.
"""

from __future__ import annotations

from math import factorial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Row = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

MOST_CANDIDATES = 1024
"""The most tokens in a tournament."""
_LN2, _LN2_HIGH, _LN2_LOW = 0.6931471805599453, 0.693147180369123816490, 1.90821492927058770002e-10
"""ln 2, and its two parts, of which the first has few digits, so that its products are exact."""
_HALF_ROOT = 0.7071067811865476
_TAYLOR = [1.0 / factorial(number) for number in range(14)]
"""Of exp."""


class Filters(NamedTuple):
    """The parameters of a draw, see `ops.sampling.sample.sample`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def add_bonus_(row: Row, green: npt.NDArray[np.bool_], bonus: float) -> None:
    """Add a bonus to the logits [V] of the green tokens, rounded to fp32 first."""
    np.add(row, np.float32(bonus), out=row, where=green)


def strongest(row: Row, count: int) -> Ids:
    """The `count` tokens with the largest logits, or all whose logits are finite, if these are fewer: larger logit
    first, then lower id."""
    ids = np.flatnonzero(row > -np.inf)
    if count < len(ids):
        alive = row[ids]
        ids = ids[alive >= np.partition(alive, len(ids) - count)[len(ids) - count]]
    return ids[np.argsort(-row[ids], kind="stable")][:count]


def filter_(row: Row, filters: Filters) -> None:
    """Set the logits [V] of the tokens that the filters drop to -inf; `sample` has their definition."""
    temperature, top_k, top_p, min_p = filters
    if not 0 < top_k < len(row) and top_p >= 1.0 and min_p <= 0.0:
        return
    weights = exponential((row.astype(np.float64) - float(row.max())) / temperature)
    dropped = weights < min_p
    if 0 < top_k < len(row):
        dropped |= row < np.partition(row, len(row) - top_k)[len(row) - top_k]
    if top_p < 1.0:
        weights[dropped] = 0.0
        mass, count = top_p * float(np.cumsum(weights)[-1]), MOST_CANDIDATES
        while True:
            ids = strongest(row, count)
            before = np.cumsum(weights[ids]) - weights[ids]
            if before[-1] >= mass or len(ids) < count or count >= len(row):
                break
            count *= 16
        kept = np.zeros(len(row), dtype=np.bool_)
        kept[ids[before < mass]] = True
        dropped |= ~kept
    row[dropped] = -np.inf


def hold_tournament_(row: Row, candidates: Ids, bits: npt.NDArray[np.uint8], temperature: float) -> None:
    """Change the logits [V] of the candidates [N] as if tokens drawn from them met in a tournament with one layer for
    each column of their bits [N, layers] (Dathathri et al. 2024, algorithm 2, with two contestants a match).

    Layer by layer, a probability p becomes p (1 + g - G), where g is the token's bit and G the probability of all
    tokens whose bit is 1. The candidates' probability together stays the same, and so do all other tokens.
    """
    logits = row[candidates].astype(np.float64)
    weights = exponential((logits - logits.max()) / temperature)
    probs = weights / np.cumsum(weights)[-1]
    factors = np.ones(len(candidates))
    for layer in bits.T.astype(np.float64):
        factor = np.maximum(1.0 + layer - np.cumsum(layer * probs)[-1], 0.0)
        probs *= factor
        factors *= factor
    row[candidates] = (logits + temperature * logarithm(factors)).astype(np.float32)


def tournament_reference(logits: Tensor, bits: Tensor, temperature: float) -> Tensor:
    """The probabilities fp64 [N] of candidates with logits [N] and bits [N, layers] after their tournament."""
    probs = (logits.double() / temperature).softmax(0)
    for layer in bits.double().T:
        probs = probs * (1 + layer - (layer * probs).sum())
    return probs


def exponential(x: Doubles) -> Doubles:
    """exp of numbers from -inf to 0, within some units in the last place; below -700 it is 0."""
    alive = x >= -700.0
    kept = np.where(alive, x, 0.0)
    powers = np.rint(kept * (1.0 / _LN2))
    rest = kept - powers * _LN2_HIGH - powers * _LN2_LOW
    total = np.full_like(rest, _TAYLOR[-1])
    for factor in _TAYLOR[-2::-1]:
        np.multiply(total, rest, out=total)
        np.add(total, factor, out=total)
    return np.where(alive, np.ldexp(total, powers.astype(np.int32)), 0.0)


def logarithm(x: Doubles) -> Doubles:
    """log of numbers that are not negative, within some units in the last place; that of 0 is -inf."""
    fractions, powers = np.frexp(np.where(x > 0.0, x, 1.0))
    small = fractions < _HALF_ROOT
    fractions, powers = np.where(small, 2.0 * fractions, fractions), np.where(small, powers - 1, powers)
    ratio = (fractions - 1.0) / (fractions + 1.0)
    square, total = ratio * ratio, np.zeros_like(ratio)
    for number in range(21, -1, -2):
        total = total * square + 1.0 / number
    return np.where(x > 0.0, 2.0 * ratio * total + powers * _LN2, -np.inf)
