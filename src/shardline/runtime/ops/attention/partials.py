"""What attention computes of some splits of the keys, and how that of all splits is merged."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partials(NamedTuple):
    """What attention computes of every row for each of some splits of 512 keys, all float32. Context parallelism gives
    split i to rank i % C, as the rank's split i // C."""

    maxima: Tensor
    """[S, T, Hq]: the largest score of the keys that the row sees; -inf if it sees none. Only the back end that wrote
    it knows its unit."""
    sums: Tensor
    """[S, T, Hq]: the sum of the weights exp(score - maximum); 0 if it sees none."""
    outputs: Tensor
    """[S, T, Hq, Dv]: the weighted sum of the values, not yet divided by the sum of the weights."""


def merge_partials_reference(ranks: Partials, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """`Kernels.merge_partials` to [T, Hq, Dv] of `dtype` in fp64, for maxima in natural units. `ranks` has tensors
    [C, S, ...], those of one rank after another."""
    maxima, sums, outputs = (part.double().flatten(0, 1) for part in ranks)
    largest = maxima.amax(0)
    weights = torch.exp(maxima - largest)
    total = (sums * weights).sum(0)
    if sinks is not None:
        total += torch.exp(sinks.double() - largest)
    return ((outputs * weights[..., None]).sum(0) / total[..., None]).to(dtype)
