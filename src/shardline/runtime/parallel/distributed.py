"""Collectives over torch.distributed: NCCL between GPUs, gloo between processes without shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shardline.config.topology import RankGrid
from shardline.kernels.contract import Kernels
from shardline.runtime.parallel.collectives import Collectives, SmallGather, StageLink
from shardline.segment.progress import ProgressLine

all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch's all-gather into one tensor; torch 2.11 and older only have the second name."""


def join_world(backend: str, store: Store, rank: int, grid: RankGrid, timeout: float) -> None:
    """Join the replica's default process group through a store that all ranks see.

    `backend` is "gloo" or "nccl". No rendezvous port is opened; gloo and NCCL listen on the interface that
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names: loopback, or that of this host's address (see env.use_interface).

    Raises:
        TimeoutError, ConnectionError: ranks are missing.
    """
    with _named_errors():
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=grid.world_size, timeout=timedelta(seconds=timeout)
        )


def rank_group(backend: str, peers_of: Sequence[tuple[int, ...]], rank: int, timeout: float) -> dist.ProcessGroup:
    """Create all groups and return the group of `rank`; `peers_of` lists the peers of every rank. Every rank creates
    every group, as torch.distributed requires.
    """
    own_group: dist.ProcessGroup | None = None
    for peers in sorted(set(peers_of)):
        with _named_errors():
            group = dist.new_group(list(peers), backend=backend, timeout=timedelta(seconds=timeout))
        if rank in peers:
            own_group = group
    assert own_group is not None
    return own_group


class DistributedCollectives(Collectives):
    """Gathers pad every rank's part to the widest one, since gloo and NCCL want equal shapes."""

    def __init__(
        self,
        kernels: Kernels,
        group: dist.ProcessGroup,
        transit: torch.device,
        progress: ProgressLine,
        small_gather: SmallGather | None = None,
        *,
        is_capturable: bool = False,
    ) -> None:
        """`transit`: the device whose memory the transport moves; `small_gather`: a faster gather for few bytes."""
        self._kernels = kernels
        self._group = group
        self._small_gather = small_gather
        self._transit = transit
        self.is_capturable = is_capturable
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._progress = progress

    def all_gather_columns(self, local: Tensor, widths: Sequence[int]) -> Tensor:
        if self._small_gather is not None and self._small_gather.has_room(local, max(widths)):
            with self._progress.waiting(), _named_errors():
                return self._small_gather.gather_columns(local, widths)
        num_rows = local.shape[0]
        parts = self._gather_flat(local, [num_rows * width for width in widths])
        out = self._kernels.activation_empty(local.dtype, num_rows, sum(widths))
        torch.cat([part.view(num_rows, width) for part, width in zip(parts, widths, strict=True)], dim=1, out=out)
        return out

    def all_gather_rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        width = local.shape[1]
        if self._small_gather is not None and min(counts) == max(counts) and self._small_gather.has_room(local, width):
            with self._progress.waiting(), _named_errors():
                return self._small_gather.gather_rows(local)
        parts = self._gather_flat(local, [count * width for count in counts])
        return torch.cat([part.view(count, width) for part, count in zip(parts, counts, strict=True)])

    def all_to_all_rows(self, local: Tensor, counts: Tensor, capacity: int) -> Tensor:
        sent, received = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        out = torch.empty(capacity, local.shape[1], dtype=local.dtype, device=local.device)
        arriving, leaving = out[: sum(received)], local[: sum(sent)].to(self._transit)
        transit_rows = (
            torch.empty_like(arriving, device=self._transit) if arriving.device != self._transit else arriving
        )
        with self._progress.waiting(), _named_errors():
            # Send bytes: gloo does not support every dtype.
            dist.all_to_all_single(
                transit_rows.view(torch.uint8), leaving.view(torch.uint8), received, sent, group=self._group
            )
        if transit_rows is not arriving:
            arriving.copy_(transit_rows)
        return out

    def all_reduce_sum(self, local: Tensor) -> Tensor:
        # gloo's all-reduce adds in no fixed order, so gather and add in rank order.
        parts = self._gather_flat(local, [local.numel()] * self.size)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.view_as(local)

    def _gather_flat(self, local: Tensor, sizes: list[int]) -> list[Tensor]:
        flat = local.reshape(-1)
        if min(sizes) < max(sizes):
            flat = torch.nn.functional.pad(flat, (0, max(sizes) - len(flat)))
        flat = flat.to(self._transit)
        gathered = flat.new_empty(len(sizes), max(sizes))
        with self._progress.waiting(), _named_errors():
            all_gather(gathered.view(-1), flat, group=self._group)
        return [part[:size] for part, size in zip(gathered.to(local.device), sizes, strict=True)]


class DistributedLink(StageLink):
    """Point-to-point sends between global ranks."""

    def __init__(self, peer: int, device: torch.device, transit: torch.device, progress: ProgressLine) -> None:
        """`device`: where received tensors are placed; `transit`: the device whose memory the transport moves."""
        self._peer = peer
        self._device = device
        self._transit = transit
        self._progress = progress

    def send(self, tensor: Tensor) -> None:
        with self._progress.waiting(), _named_errors():
            dist.send(tensor.to(self._transit), self._peer)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._transit)
        with self._progress.waiting(), _named_errors():
            dist.recv(tensor, self._peer)
        return tensor.to(self._device)


class _named_errors:
    """Turns gloo's RuntimeErrors into the façade's TimeoutError and ConnectionError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            text = str(error)
            if "imed out" in text or "imeout" in text:
                raise TimeoutError(text) from error
            raise ConnectionError(text) from error
