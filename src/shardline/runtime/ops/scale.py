"""Rows times a factor."""

from __future__ import annotations

from torch import Tensor

from shardline.kernels.contract import Kernels


def scale_rows(kernels: Kernels, x: Tensor, factors: Tensor, positions: Tensor | None = None) -> Tensor:
    """x [M, N] times factors [M] of its rows, or times factors[positions] for positions [M], or times the one factor
    [1] of all rows. Factors are float32; the product is rounded once."""
    out = kernels.activation_empty(x.dtype, *x.shape)
    kernels.scale_rows(x, factors, positions, out)
    return out


def scale_rows_reference(x: Tensor, factors: Tensor, positions: Tensor | None = None) -> Tensor:
    """`scale_rows` in plain torch."""
    own = factors if positions is None else factors[positions.long()]
    return (x.double() * own.double()[:, None]).to(x.dtype)
