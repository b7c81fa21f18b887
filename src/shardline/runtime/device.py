"""Where a rank computes, and what a step costs to get there."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.download import Download
from shardline.runtime.step import KVGroupInput, SampledTokens, StepInput


@dataclass(frozen=True)
class Device:
    """A rank's device."""

    torch: torch.device
    name: str
    """For people."""
    kernel_path: str
    """What a request's bits depend on: the instruction set, or the GPU's generation and the compiler's version."""
    memory: DeviceMemory | None = None
    """None: the host's, which is not measured."""

    @property
    def is_host(self) -> bool:
        """Whether tensors lie in the host's memory."""
        return self.torch.type == "cpu"


def open_device(kind: str, rank: int) -> Device:
    """The device "cpu", or "cuda": the GPU whose turn it is on this host. Becomes the current one.

    Raises:
        ValueError: torch finds no GPU.
    """
    if kind == "cpu":
        return Device(torch.device("cpu"), "CPU", f"{platform.machine()}-{_cpu.isa()}")
    if not torch.cuda.is_available():
        raise ValueError(f"device cuda: torch {torch.__version__} finds no GPU; install a CUDA build, or use cpu")
    import triton

    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    # Sums of the library's products stay in fp32, should it split one.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    major, minor = torch.cuda.get_device_capability(index)
    path = f"sm_{major}{minor}-triton{triton.__version__}"
    return Device(torch.device("cuda", index), torch.cuda.get_device_name(index), path, CudaMemory())


class DeviceMemory(Protocol):
    """What can be asked of a device's memory, in bytes."""

    def reserved(self) -> int:
        """What this process has taken from the device for tensors."""

    def reset_peak(self) -> None:
        """Forget what `peak` has seen."""

    def peak(self) -> int:
        """The largest `reserved` since."""

    def free_and_total(self) -> tuple[int, int]:
        """Of the whole device, whoever uses it."""

    def release(self) -> None:
        """Give back what is reserved and holds no tensor."""


class CudaMemory:
    """Of the current GPU."""

    def reserved(self) -> int:
        return torch.cuda.memory_reserved()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved()

    def free_and_total(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()

    def release(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class DeviceCounters:
    """Counters that kernels on a device raise, for somebody who looks at host memory now and then.

    On the CPU both are the same memory. On a GPU, `publish` copies after a step, as often as a look is worth it, and a
    later call finds the copy done: what the host sees may be that much behind, and one step.
    """

    _INTERVAL = 0.5  # seconds

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host = host
        self.on_device = host.to(device)
        self._due = 0.0
        self._download: Download | None = None

    def publish(self) -> None:
        """Let the host see, without waiting for the device."""
        if self.on_device is not self._host and (now := time.monotonic()) >= self._due:
            self._download = Download([self.on_device], self.on_device.device)
            self._due = now + self._INTERVAL
        if self._download is not None and self._download.is_done:
            (counters,) = self._download.wait()
            self._host.copy_(counters)
            self._download = None


class Uploader:
    """Steps from host memory to a device, in one copy that the host does not wait for."""

    _ALIGNMENT = 16  # bytes; also what lets a kernel load whole vectors

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def upload(self, step: StepInput) -> StepInput:
        """The step with all its tensors on the device, parts of one buffer."""
        tensors = [step.token_ids, step.positions, step.query_starts, step.context_lens]
        for group in step.kv_groups:
            tensors += [group.block_tables.contiguous(), group.slots]
        if (sampled := step.sampled) is not None:
            tensors += [sampled.rows, sampled.query_starts, sampled.context_lens, *sampled.block_tables]
        if step.sampling is not None:
            tensors += step.sampling.tensors()
        on_device = iter(self._copy(tensors))
        return StepInput(
            token_ids=next(on_device),
            positions=next(on_device),
            query_starts=next(on_device),
            context_lens=next(on_device),
            kv_groups=tuple(KVGroupInput(next(on_device), next(on_device)) for _ in step.kv_groups),
            replica_tokens=step.replica_tokens,
            replica_samples=step.replica_samples,
            sampled=None
            if sampled is None
            else SampledTokens(
                next(on_device), next(on_device), next(on_device), tuple(next(on_device) for _ in step.kv_groups)
            ),
            greedy=step.greedy,
            sampling=None if step.sampling is None else step.sampling.moved(on_device),
        )

    def _copy(self, tensors: list[Tensor]) -> list[Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        if self._copied is not None:
            self._copied.synchronize()  # of the step before, long done
        if end > len(self._staging):
            self._staging = torch.empty(2 * end, dtype=torch.uint8, pin_memory=self._pinned)
        for start, tensor in zip(starts, tensors, strict=True):
            self._staging[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        there = self._staging[:end].to(self._device, non_blocking=True, copy=True)
        if self._pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return [
            there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
