"""Rows and norms as the fused products of a decode step take them and leave them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class UnnormedRows(NamedTuple):
    """Rows [M, K] that stand for their RMS norm: the products that read them compute it as they load."""

    rows: Tensor
    square_sums: Tensor
    """[M, number of runs] float32: the squares of each run of neighbours, summed as `add_linear` does it."""
    weight: Tensor
    """[K], of the norm."""
    eps: float
    weight_offset: float

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype


class AddedRows(NamedTuple):
    """What `fused_ops.add_linear` gives: the residual stream after an addition."""

    rows: Tensor
    """[M, N]"""
    square_sums: Tensor
    """See UnnormedRows."""


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys before their rotation."""

    query: Tensor
    """[D], and so is the key's."""
    key: Tensor
    eps: float
    weight_offset: float
