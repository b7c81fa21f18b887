"""Memory of activations on the GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardline.kernels.cuda.library import padded_rows


def empty_rows(device: torch.device, dtype: torch.dtype, *sizes: int) -> Tensor:
    """An uninitialised tensor of shape `sizes`, in memory for as many rows as the library's product may be called
    with."""
    rows = padded_rows(sizes[0])
    if len(sizes) == 1 or rows == sizes[0]:
        return torch.empty(sizes, dtype=dtype, device=device)
    return torch.empty(rows * math.prod(sizes[1:]), dtype=dtype, device=device)[: math.prod(sizes)].view(sizes)
