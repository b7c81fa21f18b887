"""Memory of the host from which a device copies weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardline.kernels.memory import mapped_empty

_CHUNK = 512 << 20
"""Bytes. torch rounds pinned memory up to a power of two, so it is taken in such pieces."""


class HostRows:
    """Rows [num_rows, ...] of one dtype in pinned memory, which a device reads without the processor."""

    def __init__(self, like: Tensor) -> None:
        """`like`: the rows, on any device; they are copied."""
        row_bytes = max(1, like[0].nbytes)
        self._each = max(1, _CHUNK // row_bytes)
        """Rows of a piece."""
        self._pieces = [self._pinned_copy(part) for part in torch.split(like, self._each)]

    def __getitem__(self, row: int) -> Tensor:
        return self._pieces[row // self._each][row % self._each]

    def __iter__(self) -> Iterator[Tensor]:
        """The pieces."""
        return iter(self._pieces)

    @staticmethod
    def _pinned_copy(part: Tensor) -> Tensor:
        if part.device.type == "cpu":
            return mapped_empty(part.shape, part.dtype).copy_(part)
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
