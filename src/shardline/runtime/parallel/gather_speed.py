"""One rank of a measurement: how fast the GPUs of a host gather over NCCL. `shardline doctor` starts one for each GPU.

The ranks meet in a folder, so no port is open for it. With gloo, they gather memory of the host.
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from shardline.runtime.parallel.distributed import all_gather

_BYTES = 16 << 20
"""Bytes that each rank brings to a gather."""
_ROUNDS = 5
_PATIENCE = timedelta(seconds=30)


def gather_speed(backend: str, device: torch.device, folder: Path, rank: int, num_ranks: int) -> float:
    """The median over some gathers of the bytes that this rank receives in a second. All ranks call this.

    Raises:
        RuntimeError: ranks are missing, or they cannot exchange; the message is the backend's.
    """
    store = FileStore(str(folder / "ranks"), num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_PATIENCE)
    own = torch.full((_BYTES,), rank, dtype=torch.uint8, device=device)
    gathered = torch.zeros(num_ranks * _BYTES, dtype=torch.uint8, device=device)
    speeds = []
    for _ in range(1 + _ROUNDS):
        all_gather(gathered[:num_ranks], own[:1])  # all begin at once
        gathered[:num_ranks].tolist()
        began = time.perf_counter()
        all_gather(gathered, own)
        arrived = gathered.view(num_ranks, _BYTES)[:, -1].tolist()  # waits for the device
        speeds.append((num_ranks - 1) * _BYTES / (time.perf_counter() - began))
        if arrived != list(range(num_ranks)):
            raise RuntimeError(f"a gather brought other bytes than were sent: {arrived}")
    dist.destroy_process_group()
    return statistics.median(speeds[1:])


def main() -> None:
    """Entry point. The arguments are the backend, the kind of device, the folder, the rank and the number of ranks.

    Rank 0 prints the speed.
    """
    backend, kind, folder, rank, num_ranks = sys.argv[1:]
    speed = gather_speed(backend, torch.device(kind, int(rank)), Path(folder), int(rank), int(num_ranks))
    if rank == "0":
        print(speed)
