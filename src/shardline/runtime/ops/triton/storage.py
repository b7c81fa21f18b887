"""Memory of activations on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def activation_empty(dtype: torch.dtype, *sizes: int) -> Tensor:
    """An uninitialised tensor on the current GPU; torch keeps the memory between steps, and in a captured graph."""
    return torch.empty(sizes, dtype=dtype, device="cuda")
