"""The memory that a GPU needs beside the KV cache, measured by running a step and capturing a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from shardline.deployment.kv_budget import MemoryUse
from shardline.runtime.machines.cuda.graphs import GraphReplay


class DeviceMemory(Protocol):
    """Figures of a device's memory, in bytes."""

    def reserved(self) -> int:
        """Memory that this process has reserved on the device for tensors."""

    def reset_peak(self) -> None:
        """Start a new `peak`."""

    def peak(self) -> int:
        """The largest `reserved` since the last `reset_peak`."""

    def free_and_total(self) -> tuple[int, int]:
        """Free and total memory of the whole device, over all processes."""

    def release(self) -> None:
        """Free reserved memory that holds no tensor."""


class CudaMemory:
    """The memory of the current GPU."""

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


def measure_step(memory: DeviceMemory, run_step: Callable[[], object], replay: GraphReplay | None) -> MemoryUse:
    """The memory that a rank needs beside its weights for `run_step` and for the graphs of `replay`."""
    memory.release()
    held = memory.reserved()
    memory.reset_peak()
    run_step()
    step = memory.peak() - held
    memory.release()
    graphs = 0 if replay is None else graph_bytes(memory, replay)
    memory.release()
    free, total = memory.free_and_total()
    return MemoryUse(
        total=total, others=total - free - memory.reserved(), weights=memory.reserved(), step=step, graphs=graphs
    )


def graph_bytes(memory: DeviceMemory, replay: GraphReplay) -> int:
    """An upper bound of the memory for capturing all sizes. It is the sum of the largest size's scratch memory, which
    all sizes share, of every size's output, which is kept, and of the driver's memory for a graph, counted for each
    size as for the largest.

    Runs every size once, which compiles the kernels that capturing needs, and captures one size.
    """
    scratch = outputs = 0
    for size in replay.sizes:
        memory.release()
        held = memory.reserved()
        memory.reset_peak()
        outputs += replay.run_padded(size).nbytes
        scratch = max(scratch, memory.peak() - held)
    memory.release()
    reserved, (free, _) = memory.reserved(), memory.free_and_total()
    trial = replay.record_size(replay.sizes[-1])
    grown = memory.reserved() - reserved
    driver = max(0, free - memory.free_and_total()[0] - grown)
    del trial
    replay.discard_recordings()
    return max(scratch, grown) + outputs + driver * len(replay.sizes)
