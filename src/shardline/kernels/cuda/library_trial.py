"""A trial at start-up, on random data: for which products of a model does the library give the same bits as ours?"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import torch
from torch import Tensor

from shardline.kernels.cuda.library import Product, equal_sizes, matmul, tried_rows
from shardline.kernels.cuda.triton.linear import launch_linear

_SECONDS = 0.8
"""Time limit of the trial, for all shapes together."""

_log = logging.getLogger(__name__)


def ours(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Our product, whose bits do not depend on the number of rows."""
    launch_linear(x, weight, None, out)


def try_library(
    shapes: Collection[tuple[int, int]],
    most_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: int,
    *,
    exact: Product = ours,
    library: Product = matmul,
) -> dict[tuple[int, int], frozenset[int]]:
    """For every weight shape [N, K], the numbers of rows for which `library` gives the same bits as `exact`. Numbers
    are tried up to `padded_rows(most_rows)`, the largest first, within the time limit and a quarter of `free_bytes`.
    """
    started = time.monotonic()
    rng = torch.Generator(device).manual_seed(0)
    found, summaries = {}, []
    for columns, depth in sorted(shapes):
        fitting = free_bytes // 4 // dtype.itemsize // (2 * columns + depth)
        sizes = [size for size in tried_rows(most_rows) if size <= fitting]
        equal: frozenset[int] = frozenset()
        if sizes:
            x = torch.randn(sizes[-1], depth, generator=rng, device=device).to(dtype)
            weight = torch.randn(columns, depth, generator=rng, device=device).to(dtype)
            equal = equal_sizes(exact, library, x, weight, sizes[::-1], _SECONDS / len(shapes))
        found[columns, depth] = equal
        summaries.append(f"{columns}x{depth} with {len(equal)} of {len(sizes)} numbers of rows")
    _log.info("the library's products have our bits: %s (%.2f s)", "; ".join(summaries), time.monotonic() - started)
    return found
