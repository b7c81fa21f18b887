"""Memory of the host from which a device copies weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardline.kernels.memory import mapped_empty

_LARGEST, _SMALLEST = 512 << 20, 1 << 20
"""Bytes of a piece."""


class HostRows:
    """The bytes of rows [num_rows, ...] in pinned memory, which a device reads without the processor.

    torch rounds pinned memory up to a power of two, so it is taken in pieces of as much, with no regard to rows.
    """

    def __init__(self, like: Tensor) -> None:
        """`like`: the rows, dense, on any device; they are copied."""
        self._row_bytes = like[0].nbytes
        left = like.view(-1).view(torch.uint8)
        self.pieces: list[Tensor] = []
        """uint8"""
        while len(left):
            size = len(left) if len(left) <= _SMALLEST else min(_LARGEST, 1 << (len(left).bit_length() - 1))
            self.pieces.append(_pinned_copy(left[:size]))
            left = left[size:]

    def parts_of(self, row: int) -> Iterator[Tensor]:
        """The bytes of a row, in order."""
        start, stop = row * self._row_bytes, (row + 1) * self._row_bytes
        for piece in self.pieces:
            if len(part := piece[max(0, start) : max(0, stop)]):
                yield part
            start, stop = start - len(piece), stop - len(piece)


def _pinned_copy(part: Tensor) -> Tensor:
    if part.device.type == "cpu":
        return mapped_empty(part.shape, part.dtype).copy_(part)
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
