"""The exchanges between ranks: one façade over shared memory, torch.distributed, or a single rank.

Every exchanged element is a finished value that one rank has computed, except in `all_reduce_sum`, which only
`--numerics fast` uses. All ranks of a group call the same methods in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.kernels.tensors import QuantizedRows
from shardline.weights.rows import quantize_rows


class Collectives(ABC):
    """The exchanges of one group of ranks.

    Every method raises TimeoutError if a peer does not arrive within the group's time-out, and ConnectionError if the
    transport notices that a peer has gone.
    """

    rank: int
    """This rank's index in the group."""
    size: int
    is_capturable = False
    """Whether exchanges can be part of a CUDA graph."""

    @abstractmethod
    def all_gather_columns(self, local: Tensor, widths: Sequence[int]) -> Tensor:
        """[M, widths[rank]] on each rank -> [M, sum(widths)] on all, columns in rank order."""

    def all_gather_quantized(self, kernels: Kernels, local: Tensor, widths: Sequence[int]) -> QuantizedRows:
        """`quantize_rows` of `all_gather_columns`, for a caller that needs only the quantized rows."""
        return quantize_rows(kernels, self.all_gather_columns(local, widths))

    @abstractmethod
    def all_gather_rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        """[counts[rank], N] on each rank -> [sum(counts), N] on all, rows in rank order."""

    @abstractmethod
    def all_to_all_rows(self, local: Tensor, counts: Tensor, capacity: int) -> Tensor:
        """Rows from every rank to every other.

        counts: [size, size] int64, rows that rank i sends to rank j, the same on all ranks. local: [at least
        counts[rank].sum(), N], those for rank 0 first. Returns [capacity, N], those from rank 0 first; the rows after
        the first counts[:, rank].sum() are undefined.
        """

    @abstractmethod
    def all_reduce_sum(self, local: Tensor) -> Tensor:
        """The sum over ranks of float32 tensors of one shape, added in rank order."""


class SmallGather(Protocol):
    """Gathers of few bytes within a group, faster than the group's own gathers."""

    def has_room(self, local: Tensor, widest: int) -> bool:
        """Whether a part with as many rows as `local` and `widest` columns fits."""

    def gather_columns(self, local: Tensor, widths: Sequence[int]) -> Tensor:
        """As `Collectives.all_gather_columns`."""

    def gather_rows(self, local: Tensor) -> Tensor:
        """As `Collectives.all_gather_rows` with the same number of rows on every rank."""


class StageLink(ABC):
    """Sends hidden states one way, from a rank to its successor in the next stage."""

    @abstractmethod
    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor; returns once it is on its way."""

    @abstractmethod
    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor from the previous stage; it has this shape and dtype."""


class SingleRank(Collectives):
    """The group of one: every exchange is the identity."""

    rank = 0
    size = 1
    is_capturable = True

    def all_gather_columns(self, local: Tensor, widths: Sequence[int]) -> Tensor:
        return local

    def all_gather_rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        return local

    def all_to_all_rows(self, local: Tensor, counts: Tensor, capacity: int) -> Tensor:
        return local

    def all_reduce_sum(self, local: Tensor) -> Tensor:
        return local
