"""Memory for what every step streams through: weights, and activations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.reserve import HUGE_PAGE, map_memory, weight_reserve


def activation_empty(*sizes: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor that dies within its step, from memory that the calling thread keeps between steps.

    The system's allocator would return large blocks to the kernel and fault their pages in again at every step.
    """
    return _cpu.activation_empty(dtype, *sizes)


def stacked_rows(parts: Sequence[Tensor]) -> Tensor:
    """Matrices [*, N] one under another; on the host in memory as of `mapped_empty`."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].device.type != "cpu":
        return torch.cat(list(parts))
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.cat(list(parts), out=mapped_empty(shape, parts[0].dtype))


def streamed_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor for weights, on huge pages, where the system has them; from the reserve, if any is left.

    Hardware prefetch stops at the end of a page: with pages of 4 KiB a core here reads a weight at two thirds of the
    speed that it reaches with pages of 2 MiB.
    """
    count = math.prod(shape)
    taken = weight_reserve.take(count * dtype.itemsize) if count else None
    if taken is None:
        return mapped_empty(shape, dtype)
    memory, offset = taken
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def mapped_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor whose memory, if it is worth huge pages, goes back to the system when it dies.

    The allocator's may not, between what lives: so this suits large tensors that live for a moment while a model loads.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < HUGE_PAGE:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(map_memory(count * dtype.itemsize), dtype=dtype, count=count).view(tuple(shape))
