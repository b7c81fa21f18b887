"""Back ends: one folder per kind of machine; `base.py` is the contract. Importing this package imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from shardline.runtime.machines.base import Backend

_FOLDERS = {"cpu": "host"}
"""Kinds of device whose folder has another name."""


def open_backend(kind: str, rank: int, threads: int, kernels: str = "own") -> Backend:
    """The back end of a rank, opened once, in the thread that runs the rank's steps.

    `kind`: the kind of device, which names its folder, unless `kernels` is "torch"; `threads`: number of host threads
    that the rank may use.

    Raises:
        ValueError: there is no such device.
    """
    if kernels == "torch":
        return cast("Backend", importlib.import_module(backend_module("torch")).open_backend(kind, rank, threads))
    return cast("Backend", importlib.import_module(backend_module(kind)).open_backend(rank, threads))


def backend_module(kind: str) -> str:
    """The name of the module that opens a kind of device."""
    return f"{__name__}.{_FOLDERS.get(kind, kind)}.machine"


def reserve_memory(num_bytes: int, touched_bytes: int) -> None:
    """Begin to reserve host memory for weights, before torch is imported. Does nothing if `touched_bytes` is 0."""
    if touched_bytes:
        from shardline.kernels.host.memory import weight_reserve

        weight_reserve.fill_memory(num_bytes, touched_bytes)
