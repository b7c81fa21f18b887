"""Memory of the host from which a device copies weights."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator

import torch
from torch import Tensor

from shardline.kernels.memory import mapped_empty

_LARGEST, _SMALLEST = 512 << 20, 1 << 20
"""Bytes of a piece."""


class HostRows:
    """Rows [num_rows, ...] of one dtype in pinned memory, which a device reads without the processor.

    torch rounds pinned memory up to a power of two, so it is taken in pieces of about as much. Rows are whole, so those
    of more than half of a power of two still take all of it.
    """

    def __init__(self, like: Tensor) -> None:
        """`like`: the rows, on any device; they are copied."""
        row_bytes, start = max(1, like[0].nbytes), 0
        self._starts: list[int] = []
        """The first row of each piece."""
        self._pieces: list[Tensor] = []
        while start < len(like):
            left = (len(like) - start) * row_bytes
            size = left if left <= _SMALLEST else min(_LARGEST, 1 << (left.bit_length() - 1))
            count = max(1, size // row_bytes)
            self._starts.append(start)
            self._pieces.append(self._pinned_copy(like[start : start + count]))
            start += count

    def __getitem__(self, row: int) -> Tensor:
        piece = bisect(self._starts, row) - 1
        return self._pieces[piece][row - self._starts[piece]]

    def __iter__(self) -> Iterator[Tensor]:
        """The pieces."""
        return iter(self._pieces)

    @staticmethod
    def _pinned_copy(part: Tensor) -> Tensor:
        if part.device.type == "cpu":
            return mapped_empty(part.shape, part.dtype).copy_(part)
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
