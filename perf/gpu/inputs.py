"""Inputs of the checks, and the comparison of their results."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.cuda.gpu_kernels import CudaKernels


class Inputs:
    """Inputs on one device, of one dtype."""

    def __init__(self, device: str, dtype: torch.dtype, small: bool) -> None:
        self.device, self.dtype, self.small = device, dtype, small
        self.kernels = CudaKernels(torch.device(device))
        self.rng = torch.Generator().manual_seed(7)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.dtype).to(self.device)

    def poison(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype or self.dtype, device=self.device)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x times the transpose of weight, plus bias, with sums in fp64: [M, N] of x's dtype."""
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; infinite if anything is NaN."""
    difference = (actual.double().cpu() - expected.double()).norm() / expected.double().norm()
    return float("inf") if difference.isnan() else difference.item()
