"""Ranks that are threads of this process, over memory or over sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from shardline.runtime.parallel.exchange import Group, SharedGroup, SocketGroup

SOCKETS = -1
"""In place of the bytes of a group's memory: the ranks have sockets."""


def zeros(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def socket_groups(size: int) -> list[SocketGroup]:
    """The group of each rank; rank r is called "rank r at home"."""
    fds = [[-1] * size for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            ours, theirs = socket.socketpair()
            fds[low][high], fds[high][low] = ours.detach(), theirs.detach()
    names = [f"rank {rank} at home" for rank in range(size)]
    return [SocketGroup(fds[rank], rank, names) for rank in range(size)]


def run_ranks(size: int, body: Callable[[Group], object], *, data_bytes: int = 1 << 14) -> list:
    """Runs body on `size` ranks, each a thread; returns what they return or raise."""
    groups: list[Group]
    if data_bytes == SOCKETS:
        groups = list(socket_groups(size))
    else:
        buffer = zeros(SharedGroup.required_bytes(size, data_bytes))
        groups = [SharedGroup(buffer, rank, size) for rank in range(size)]

    def run(rank: int) -> object:
        try:
            return body(groups[rank])
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
