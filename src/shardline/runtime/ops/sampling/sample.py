"""One token per row of logits.

A draw is a function of (seed, choice index, position, purpose): it does not depend on earlier draws or on the other
rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardline.kernels.contract import Kernels

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""


def greedy_argmax(kernels: Kernels, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(ids int64 [M], their logits [M]) of the largest logit in each row of logits [M, V] fp32; the lowest id wins
    ties."""
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    values = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    kernels.greedy_argmax(logits, ids, values)
    return ids, values


def find_best(kernels: Kernels, logits: Tensor) -> Tensor:
    """[M, 2] float32: the largest logit of each row of logits [M, N] fp32, and the bits of its column as int32; see
    `PackedLinear.argmax`."""
    ids, values = greedy_argmax(kernels, logits)
    return torch.stack([values, ids.to(torch.int32).view(torch.float32)], dim=1)


def sample(
    kernels: Kernels,
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    purpose: int = 0,
) -> Tensor:
    """Token ids int64 [M] for logits [M, V] fp32 (rows may be strided).

    Per row: temperature, top_p and min_p float32 (off: 1.0 and 0.0), top_k int32 (off: <= 0), and seeds, choices and
    positions int64. A temperature below GREEDY_BELOW takes the largest logit; the lowest id wins ties. Otherwise the
    probabilities at that temperature are filtered. min_p drops tokens with less than min_p times the largest
    probability. top_k keeps the k largest and all that equal the k-th. top_p keeps the fewest tokens that hold top_p of
    the remaining mass, by falling probability, lower ids first on ties. The draw picks from the remaining tokens in id
    order, with fp64 sums.
    """
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    kernels.sample(logits, temperature, top_k, top_p, min_p, seeds, choices, positions, purpose, tokens)
    return tokens


def kept_tokens_reference(
    logits: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Unnormalised fp64 weights [V] of one row after the filters: zero for dropped tokens."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    weights[weights < min_p] = 0.0
    if 0 < top_k < len(logits):
        weights[logits < np.sort(logits)[-top_k]] = 0.0
    if top_p < 1.0:
        strongest_first = np.lexsort((np.arange(len(logits)), -logits))
        mass = np.cumsum(weights[strongest_first])
        num_kept = int(np.searchsorted(mass, top_p * weights.sum())) + 1
        weights[strongest_first[num_kept:]] = 0.0
    return weights


def sample_reference(
    logits: np.ndarray,
    u: float,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """The token of one row [V] for the draw u."""
    if temperature < GREEDY_BELOW:
        return int(logits.argmax())
    weights = kept_tokens_reference(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    mass = np.cumsum(weights)
    return int(np.searchsorted(mass, u * mass[-1], side="right"))
