"""A worker process whose device, the CPU, claims to have so much memory: what a rank on a GPU does at its start."""

from __future__ import annotations

import dataclasses

from shardline.runtime import device as device_module
from shardline.runtime import worker as worker_module
from shardline.runtime import worker_process

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


def open_device(kind: str, rank: int) -> device_module.Device:
    """The CPU, with memory to measure."""
    assert kind == "cpu"
    return dataclasses.replace(device_module.open_device(kind, rank), memory=ClaimedMemory(rank))


def main() -> None:
    """As `worker_process.main`."""
    worker_module.open_device = open_device
    worker_process.main()
