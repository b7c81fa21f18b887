"""Collectives between ranks of one host (processes or threads) through memory that all ranks map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.runtime.backends.base import Kernels
from shardline.runtime.parallel.collectives import Collectives, StageLink
from shardline.runtime.parallel.shared_group import Mailbox, SharedGroup
from shardline.segment.progress import ProgressLine
from shardline.weights.rows import QuantizedRows


class SharedCollectives(Collectives):
    """A gather has three steps: each rank writes its slice into the segment, all ranks pass one barrier, each rank
    reads the whole."""

    def __init__(
        self,
        kernels: Kernels,
        buffer: memoryview,
        rank: int,
        size: int,
        timeout: float,
        progress: ProgressLine,
    ) -> None:
        self._kernels = kernels
        self.rank = rank
        self.size = size
        self._group = SharedGroup(buffer, rank, size, progress=progress.exchanges)
        self._timeout = timeout

    def all_gather_columns(self, local: Tensor, widths: Sequence[int]) -> Tensor:
        out = self._kernels.activation_empty(local.dtype, local.shape[0], sum(widths))
        self._group.all_gather_columns(local, list(widths), out, self._timeout)
        return out

    def all_gather_quantized(self, kernels: Kernels, local: Tensor, widths: Sequence[int]) -> QuantizedRows:
        rows = kernels.quantized_empty(local.shape[0], sum(widths), local.dtype)
        self._group.all_gather_quantized(local, list(widths), rows.values, rows.scales, rows.sums, self._timeout)
        return rows

    def all_gather_rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        out = self._kernels.activation_empty(local.dtype, sum(counts), local.shape[1])
        self._group.all_gather_rows(local, list(counts), out, self._timeout)
        return out

    def all_to_all_rows(self, local: Tensor, counts: Tensor, capacity: int) -> Tensor:
        out = self._kernels.activation_empty(local.dtype, capacity, local.shape[1])
        self._group.all_to_all_rows(local, counts, out, self._timeout)
        return out

    def all_reduce_sum(self, local: Tensor) -> Tensor:
        self._group.all_reduce_sum(local, self._timeout)
        return local


class SharedLink(StageLink):
    """A ring of bytes with one writer and one reader."""

    def __init__(self, buffer: memoryview, timeout: float, progress: ProgressLine) -> None:
        self._mailbox = Mailbox(buffer)
        self._timeout = timeout
        self._progress = progress

    def send(self, tensor: Tensor) -> None:
        with self._progress.waiting():
            self._mailbox.send(tensor, self._timeout)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        with self._progress.waiting():
            self._mailbox.recv_into(tensor, self._timeout)
        return tensor
