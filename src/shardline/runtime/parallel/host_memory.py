"""Collectives that move host memory: through a shared segment within a host, over sockets between hosts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.kernels.tensors import QuantizedRows
from shardline.runtime.parallel.collectives import Collectives
from shardline.runtime.parallel.exchange import Group


class HostCollectives(Collectives):
    """The exchanges of a group of `shardline._cpu`. A recorded program replays them too."""

    def __init__(self, kernels: Kernels, group: Group, timeout: float) -> None:
        """`timeout`: seconds that an exchange may take."""
        self._kernels = kernels
        self.rank = group.rank
        self.size = group.size
        self._group = group
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

    def abort(self) -> None:
        """See `RankGroups.abort`."""
        self._group.abort()
