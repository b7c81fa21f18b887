"""Gathers over symmetric memory: GPUs of one host that read each other's, without a library's protocol in between.

A decode step gathers a few kilobytes, four times a layer: what counts is how long the first byte takes. Larger
messages, and GPUs that cannot reach each other, are NCCL's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.runtime.backends.cuda.activations import empty_rows
from shardline.runtime.backends.cuda.kernels.gather import collect_columns, put_columns
from shardline.runtime.parallel.distributed import all_gather

_log = logging.getLogger(__name__)

_HALF_BYTES = 4 << 20
"""Largest part of a rank: beyond, NCCL's bandwidth decides."""


class SymmetricMemory(Protocol):
    """What is used of torch's handle of that name."""

    @property
    def buffer_ptrs(self) -> Sequence[int]:
        """Where the buffers of all ranks are mapped here."""

    def barrier(self, channel: int = ..., timeout_ms: int = ...) -> None:
        """Launch a wait for all ranks: memory that they wrote before is visible behind it."""


class SymmetricGather:
    """Gathers of one group of ranks. All call it with the same sizes, in the same order, on one stream each."""

    def __init__(self, buffer: Tensor, handle: SymmetricMemory, timeout: float) -> None:
        """`buffer`: this rank's, uint8 [2, bytes of the largest part]; timeout: seconds until a wait gives up."""
        self._buffer = buffer
        self._handle = handle
        self._timeout_ms = int(1000 * timeout)
        self._peers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=buffer.device)
        self._turns = torch.zeros(2, dtype=torch.int32, device=buffer.device)
        self._starts: dict[tuple[int, ...], Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self._buffer.device

    def has_room(self, local: Tensor, widest: int) -> bool:
        """Whether there is room for a part of local's rows and so many columns."""
        return len(local) * widest * local.dtype.itemsize <= self._buffer.shape[1]

    def gather_columns(self, local: Tensor, widths: Sequence[int]) -> Tensor:
        """As `Collectives.all_gather_columns`; what unlike widths were asked for once is kept."""
        out = empty_rows(local.device, local.dtype, len(local), sum(widths))
        buffer = self._buffer.view(local.dtype)
        put_columns(local, buffer, self._turns)
        self._handle.barrier(0, self._timeout_ms)
        starts = self._starts_of(widths) if min(widths) < max(widths) else None
        collect_columns(self._peers, buffer.shape[1], starts, max(widths), out, self._turns)
        return out

    def gather_rows(self, local: Tensor) -> Tensor:
        """As `Collectives.all_gather_rows` of as many rows on every rank."""
        flat = self.gather_columns(local.reshape(1, -1), [local.numel()] * len(self._peers))
        return flat.view(-1, local.shape[1])

    def _starts_of(self, widths: Sequence[int]) -> Tensor:
        key = tuple(widths)
        if key not in self._starts:
            starts = torch.tensor([0, *key]).cumsum(0)
            self._starts[key] = starts.to(self._buffer.device, torch.int32)
        return self._starts[key]


def symmetric_gather(group: dist.ProcessGroup, device: torch.device, timeout: float) -> SymmetricGather | None:
    """Of a group over NCCL whose GPUs NVLink connects, once a trial has given what NCCL does; None elsewhere. All ranks
    of the group call it, and all get one or none.

    Raises:
        RuntimeError: a GPU gave up in the trial, and can no longer be used.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    count = torch.cuda.device_count()
    if not _are_linked([rank % count for rank in dist.get_process_group_ranks(group)]):
        return None
    gather: SymmetricGather | None = None
    try:
        buffer = symmetric_memory.empty(2, _HALF_BYTES, dtype=torch.uint8, device=device)
        gather = SymmetricGather(buffer, symmetric_memory.rendezvous(buffer, group), timeout)
    except RuntimeError as error:
        _log.warning("NVLink connects the GPUs, but there is no symmetric memory: %s", error)
    if not _all_agree(gather is not None, group, device):
        return None
    assert gather is not None
    try:
        equal = _passes_trial(gather, group)
    except RuntimeError as error:
        raise RuntimeError(
            f"gathers over symmetric memory fail here: start with --collectives nccl ({error})"
        ) from error
    if not _all_agree(equal, group, device):
        _log.warning("gathers over symmetric memory differ from NCCL's: NCCL is used")
        return None
    return gather


def _are_linked(devices: Sequence[int]) -> bool:
    """Whether NVLink, directly or by switches, connects each two of these GPUs. PCIe often lacks the atomic operations
    between GPUs with which torch's barrier waits."""
    from torch._C import _distributed_c10d
    from torch._C._autograd import DeviceType

    detect: Callable[..., Any] = vars(_distributed_c10d)["_detect_dma_connectivity"]  # torch's stubs leave it out
    try:
        links = detect(DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:
        return False
    return all(links[i][j] > 0 for i in devices for j in devices if i != j)


def _passes_trial(gather: SymmetricGather, group: dist.ProcessGroup) -> bool:
    """Whether three gathers in a row, so that a half is used again, give what NCCL does."""
    equal = True
    for turn in range(3):
        local = torch.randint(-9999, 9999, (7 + turn, 96), dtype=torch.int32, device=gather.device)
        expected = local.new_empty(group.size(), *local.shape)
        all_gather(expected.view(-1), local.view(-1), group=group)
        equal &= torch.equal(gather.gather_rows(local), expected.flatten(0, 1))
    return equal


def _all_agree(answer: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    answers = torch.tensor([int(answer)], device=device)
    dist.all_reduce(answers, dist.ReduceOp.MIN, group=group)
    return bool(answers.item())
