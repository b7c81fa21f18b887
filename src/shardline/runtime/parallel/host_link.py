"""The link between two stages that moves host memory: through a shared segment within a host, over a socket between
hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.runtime.parallel.collectives import StageLink
from shardline.runtime.parallel.exchange import Mailbox, SocketLink
from shardline.segment.progress import ProgressLine


class HostLink(StageLink):
    """A mailbox in a shared segment, or a connection, with one writer and one reader."""

    def __init__(self, link: Mailbox | SocketLink, timeout: float, progress: ProgressLine) -> None:
        """`timeout`: seconds that a message may take."""
        self._link = link
        self._timeout = timeout
        self._progress = progress

    def send(self, tensor: Tensor) -> None:
        with self._progress.waiting():
            self._link.send(tensor, self._timeout)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        with self._progress.waiting():
            self._link.recv_into(tensor, self._timeout)
        return tensor

    def abort(self) -> None:
        """See `RankGroups.abort`."""
        self._link.abort()
