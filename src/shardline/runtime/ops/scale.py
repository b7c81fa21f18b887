"""Rows times a factor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels


def scale_rows(kernels: Kernels, x: Tensor, factors: Tensor, positions: Tensor | None = None) -> Tensor:
    """x [M, N] times factors [M] of its rows, or times factors[positions] for positions [M], or times the one factor
    [1] of all rows. Factors are float32; the product is rounded once."""
    out = kernels.activation_empty(x.dtype, *x.shape)
    kernels.scale_rows(x, factors, positions, out)
    return out


def join_columns(kernels: Kernels, parts: Sequence[Tensor], one: Tensor) -> Tensor:
    """Tensors [M, N_i] side by side, with a kernel, so that recorded steps repeat it. `one`: [1] float32, on their
    device."""
    out = kernels.activation_empty(parts[0].dtype, len(parts[0]), sum(part.shape[1] for part in parts))
    for part, columns in zip(parts, torch.split(out, [part.shape[1] for part in parts], dim=1), strict=True):
        kernels.scale_rows(part, one, None, columns)
    return out


def scale_rows_reference(x: Tensor, factors: Tensor, positions: Tensor | None = None) -> Tensor:
    """`scale_rows` in plain torch."""
    own = factors if positions is None else factors[positions.long()]
    return (x.double() * own.double()[:, None]).to(x.dtype)
