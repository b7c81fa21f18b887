"""The factors of a linear's outputs under DoRA: "DoRA: Weight-Decomposed Low-Rank Adaptation" (Liu et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.weights.formats import plain

_CHUNK = 1 << 18
"""Elements of a weight at a time."""


def output_factors(
    kernels: Kernels,
    device: torch.device,
    base: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    magnitude: Tensor,
) -> Tensor:
    """magnitude / ||base + scale * up down||, the norms being those of rows: float32 [rows].

    base [rows, in] in the activations' dtype, to which down [rank, in] and up [rows, rank] are rounded; magnitude
    [rows]; all in host memory. `device`: that of the kernels. A row's bits depend on that row alone, so all ways of
    sharing rows find the same factors: sums of the low-rank product are those of a linear, and others are added in one
    order.
    """
    change = plain.Format().pack_linear(kernels, down.T.to(base.dtype).contiguous())
    step = max(1, _CHUNK // base.shape[1])
    norms: list[Tensor] = [torch.empty(0, dtype=torch.float64)]
    for first in range(0, len(base), step):
        rows = slice(first, first + step)
        own = up[rows].to(device, base.dtype).contiguous()
        changed = change(own, out_dtype=torch.float32).cpu().double() * scale  # not every device has float64
        norms.append(_sum_rows((base[rows].double() + changed).square_()).sqrt_())
    factors: Tensor = magnitude.double() / torch.cat(norms)
    return factors.float()


def output_factors_reference(base: Tensor, down: Tensor, up: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """`output_factors` in plain torch."""
    changed = base.double() + scale * (up.to(base.dtype).double() @ down.to(base.dtype).double())
    factors: Tensor = magnitude.double() / changed.norm(dim=1)
    return factors.float()


def _sum_rows(x: Tensor) -> Tensor:
    """The sums of rows [R, N], which are overwritten, in an order that depends on N alone."""
    while (size := x.shape[1]) > 1:
        half = (size + 1) // 2
        x[:, : size - half] += x[:, half:]
        x = x[:, :half]
    return x[:, 0]
