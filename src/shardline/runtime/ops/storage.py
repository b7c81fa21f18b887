"""Memory for what every step streams through: weights, and activations."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from shardline import _cpu

_HUGE_PAGE = 2 << 20


def activation_empty(*sizes: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor that dies within its step, from memory that the calling thread keeps between steps.

    The system's allocator would return large blocks to the kernel and fault their pages in again at every step.
    """
    return _cpu.activation_empty(dtype, *sizes)


def stacked_rows(parts: Sequence[Tensor]) -> Tensor:
    """Matrices [*, N] one under another; on the host in memory as of `streamed_empty`."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].device.type != "cpu":
        return torch.cat(list(parts))
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.cat(list(parts), out=streamed_empty(shape, parts[0].dtype))


def streamed_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on huge pages, where the system has them and the tensor is worth one.

    Hardware prefetch stops at the end of a page: with pages of 4 KiB a core here reads a weight at two thirds of the
    speed that it reaches with pages of 2 MiB. And its memory goes back to the system when it dies, which the
    allocator's may not, between what lives: so it suits large tensors that live for a moment while a model loads.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Kernels without huge pages refuse the advice; nothing depends on it but speed.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(tuple(shape))
