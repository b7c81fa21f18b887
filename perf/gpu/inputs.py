"""Random inputs on a device, and calls that may fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardline.kernels.cuda.gpu_kernels import CudaKernels


class Inputs:
    """Inputs on one device, of one dtype."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.kernels = CudaKernels(torch.device(device))
        self.rng = torch.Generator().manual_seed(7)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.dtype).to(self.device)

    def poison(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype or self.dtype, device=self.device)


def attempt(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of a call, or its traceback: one broken part must not hide the others."""
    try:
        return function(*arguments, **options)
    except Exception:
        return traceback.format_exc(limit=-3)
