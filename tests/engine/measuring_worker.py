"""A worker process whose device, the CPU, claims to have so much memory: what a rank on a GPU does at its start."""

from __future__ import annotations

from collections.abc import Callable

from shardline.deployment.kv_budget import MemoryUse
from shardline.runtime import worker_process
from shardline.runtime.machines.base import Replay
from shardline.runtime.machines.cuda.measuring import measure_step
from shardline.runtime.machines.host.machine import HostBackend, use_threads

MIB = 1 << 20
TOTALS = (64 * MIB, 18 * MIB)
"""Of each rank's device."""
OTHERS, WEIGHTS, STEP = 5 * MIB, 8 * MIB, 3 * MIB


class ClaimedMemory:
    """Of a rank; a step has run, and its peak is there, once the peak was reset."""

    def __init__(self, rank: int) -> None:
        self._total = TOTALS[rank]
        self._peak = 0

    def reserved(self) -> int:
        return WEIGHTS

    def reset_peak(self) -> None:
        self._peak = WEIGHTS + STEP

    def peak(self) -> int:
        return self._peak

    def free_and_total(self) -> tuple[int, int]:
        return self._total - OTHERS - WEIGHTS, self._total

    def release(self) -> None: ...


class MeasuredHost(HostBackend):
    """The CPU, with memory to measure."""

    def __init__(self, rank: int, threads: int) -> None:
        super().__init__(threads)
        self._memory = ClaimedMemory(rank)

    def measure_step(self, run_step: Callable[[], object], replay: Replay) -> MemoryUse:
        """As a GPU does it; no step is recorded beforehand."""
        return measure_step(self._memory, run_step, None)


def open_backend(kind: str, rank: int, threads: int, kernels: str = "own") -> MeasuredHost:
    """As `backends.open_backend`."""
    assert kind == "cpu"
    use_threads(threads)
    return MeasuredHost(rank, threads)


def main() -> None:
    """As `worker_process.main`."""
    worker_process.open_backend = open_backend  # type: ignore[attr-defined]
    worker_process.main()
