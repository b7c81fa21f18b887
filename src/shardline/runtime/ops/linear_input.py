"""The forms in which a product takes its rows: as they are, quantized, or before their norm."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardline.runtime.ops.quantize_rows import QuantizedRows, quantize_rows


class UnnormedRows(NamedTuple):
    """Rows [M, K] whose RMS norm is what is meant: on a GPU, the products that read it compute it as they load."""

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


LinearInput = Tensor | QuantizedRows | UnnormedRows
"""Rows of activations, as a product takes them."""

InputForm = Literal["tensor", "quantized", "unnormed"]
"""What a product takes besides tensors: nothing, `QuantizedRows` or `UnnormedRows`, with the bits of what they stand
for."""


def as_quantized(x: LinearInput) -> QuantizedRows:
    """x, quantized unless it is."""
    if isinstance(x, QuantizedRows):
        return x
    return quantize_rows(as_tensor(x))


def as_tensor(x: object) -> Tensor:
    """x, for who takes nothing else."""
    assert isinstance(x, Tensor)
    return x
