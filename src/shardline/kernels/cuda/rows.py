"""Inputs and outputs of the fused products of a decode step: rows and norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class UnnormedRows(NamedTuple):
    """Rows [M, K] that stand for their RMS norm: the products that read them normalise them while loading."""

    rows: Tensor
    square_sums: Tensor
    """[M, number of runs] float32: the sum of squares of each run of neighbours, as `add_linear` computes it."""
    weight: Tensor
    """[K]: the weight of the norm."""
    eps: float
    weight_offset: float

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype


class AddedRows(NamedTuple):
    """The result of `fused_ops.add_linear`: the residual stream after an addition."""

    rows: Tensor
    """[M, N]"""
    square_sums: Tensor
    """See UnnormedRows."""


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys before their rotation."""

    query: Tensor
    """[D]: the weight of the queries' norm; the weight of the keys' norm has the same shape."""
    key: Tensor
    eps: float
    weight_offset: float
