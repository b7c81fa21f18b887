"""What GPUs this host has and what memory they have free, as the driver's own tool says: no torch is needed to ask."""

from __future__ import annotations

import importlib.metadata
import subprocess

_QUERY = ("nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT = 20.0


def gpu_memory() -> list[tuple[int, int]]:
    """(bytes in all, bytes free) of each GPU of this host; empty if there is none, or torch was built without CUDA."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return []
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return [(int(total) << 20, int(free) << 20) for total, free in rows]
