"""Environment variables. No other module reads os.environ."""

from __future__ import annotations

import os


def cuda_visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as the user set it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def log_level() -> str:
    """SHARDLINE_LOG_LEVEL: DEBUG, INFO (default), WARNING or ERROR."""
    return os.environ.get("SHARDLINE_LOG_LEVEL", "INFO").upper()


def api_key() -> str | None:
    """SHARDLINE_API_KEY: the key that clients must send, if --api-key is not given."""
    return os.environ.get("SHARDLINE_API_KEY")


def force_isa() -> str | None:
    """SHARDLINE_ISA: use this CPU kernel path instead of the best one."""
    return os.environ.get("SHARDLINE_ISA")


def for_children(gpus: str | None = None) -> dict[str, str]:
    """The environment of engines and workers. Unless the user set an interface, gloo listens on the loopback interface.

    `gpus`: the GPUs that they see, as in CUDA_VISIBLE_DEVICES; None: the same as this process.
    """
    seen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **seen}
