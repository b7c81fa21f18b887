"""Gathers over symmetric memory: GPUs of one host read each other's memory directly, without a library's protocol.

A decode step gathers a few kilobytes, four times a layer, so latency matters most. NCCL serves larger messages, and
GPUs that cannot read each other's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.kernels.cuda.activations import empty_rows
from shardline.kernels.cuda.triton.gather import collect_columns, put_columns
from shardline.runtime.parallel.distributed import all_gather

_log = logging.getLogger(__name__)

_HALF_BYTES = 4 << 20
"""Largest part of a rank; for larger parts bandwidth matters most, and NCCL is used."""


class SymmetricMemory(Protocol):
    """The part of torch's handle of the same name that is used here."""

    @property
    def buffer_ptrs(self) -> Sequence[int]:
        """Addresses at which the buffers of all ranks are mapped in this process."""

    def barrier(self, channel: int = ..., timeout_ms: int = ...) -> None:
        """Launch a wait for all ranks. Memory that they wrote before the barrier is visible after it."""


class SymmetricGather:
    """Gathers of one group of ranks. All call it with the same sizes, in the same order, on one stream each."""

    def __init__(self, buffer: Tensor, handle: SymmetricMemory, timeout: float) -> None:
        """`buffer`: this rank's buffer, uint8 [2, bytes of the largest part]; `timeout`: seconds until a wait gives
        up."""
        self._buffer = buffer
        self._handle = handle
        self._timeout_ms = int(1000 * timeout)
        self._peers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=buffer.device)
        self._turns = torch.zeros(2, dtype=torch.int32, device=buffer.device)
        self._starts: dict[tuple[int, ...], Tensor] = {}

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self._buffer.device

    def has_room(self, local: Tensor, widest: int) -> bool:
        """Whether a part with as many rows as `local` and `widest` columns fits."""
        return len(local) * widest * local.dtype.itemsize <= self._buffer.shape[1]

    def gather_columns(self, local: Tensor, widths: Sequence[int]) -> Tensor:
        """As `Collectives.all_gather_columns`; the column starts of unequal widths are cached."""
        out = empty_rows(local.device, local.dtype, len(local), sum(widths))
        buffer = self._buffer.view(local.dtype)
        put_columns(local, buffer, self._turns)
        self._handle.barrier(0, self._timeout_ms)
        starts = self._starts_of(widths) if min(widths) < max(widths) else None
        collect_columns(self._peers, buffer.shape[1], starts, max(widths), out, self._turns)
        return out

    def gather_rows(self, local: Tensor) -> Tensor:
        """As `Collectives.all_gather_rows` with the same number of rows on every rank."""
        flat = self.gather_columns(local.reshape(1, -1), [local.numel()] * len(self._peers))
        return flat.view(-1, local.shape[1])

    def _starts_of(self, widths: Sequence[int]) -> Tensor:
        key = tuple(widths)
        if key not in self._starts:
            starts = torch.tensor([0, *key]).cumsum(0)
            self._starts[key] = starts.to(self._buffer.device, torch.int32)
        return self._starts[key]


def symmetric_gather(group: dist.ProcessGroup, device: torch.device, timeout: float) -> SymmetricGather | None:
    """The gather of an NCCL group, if NVLink connects its GPUs and a trial gives the same result as NCCL; else None.
    All ranks of the group must call it, and either all get a gather or none does.

    Raises:
        RuntimeError: a GPU failed in the trial and cannot be used any more.
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
        _log.warning("NVLink connects the GPUs, but symmetric memory is not available: %s", error)
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
    """Whether NVLink connects every pair of these GPUs, directly or through switches. PCIe often lacks the atomic
    operations between GPUs that torch's barrier needs."""
    from torch._C import _distributed_c10d
    from torch._C._autograd import DeviceType

    detect: Callable[..., Any] = vars(_distributed_c10d)["_detect_dma_connectivity"]  # torch's stubs leave it out
    try:
        links = detect(DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:
        return False
    return all(links[i][j] > 0 for i in devices for j in devices if i != j)


def _passes_trial(gather: SymmetricGather, group: dist.ProcessGroup) -> bool:
    """Whether three gathers in a row give the same results as NCCL. The third uses the first half of the buffer
    again."""
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
