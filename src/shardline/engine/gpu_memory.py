"""What GPUs this host has and what memory they have free, as the driver's own tool says: no torch is needed to ask."""

from __future__ import annotations

import importlib.metadata
import subprocess

from shardline import env

_QUERY = ("nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT = 20.0


def gpu_memory() -> list[tuple[int, int]]:
    """(bytes in all, bytes free) of each GPU of this host that CUDA_VISIBLE_DEVICES leaves visible; empty if there is
    none, or torch was built without CUDA."""
    visible = env.cuda_visible_devices()
    if visible == "" or importlib.metadata.version("torch").endswith("+cpu"):
        return []
    query = _QUERY if visible is None else (*_QUERY, f"--id={visible}")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return [(int(total) << 20, int(free) << 20) for total, free in rows]


def gpus_of_replica(index: int, num_ranks: int) -> str:
    """CUDA_VISIBLE_DEVICES of the engine that runs replica `index`, of `num_ranks` each."""
    visible = env.cuda_visible_devices()
    mine = range(index * num_ranks, (index + 1) * num_ranks)
    names = [str(gpu) for gpu in mine] if visible is None else visible.split(",")[mine.start : mine.stop]
    return ",".join(names)
