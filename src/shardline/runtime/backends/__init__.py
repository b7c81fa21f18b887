"""Back ends: one folder a kind of machine; `base.py` is the contract. Importing this package imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from shardline.runtime.backends.base import Backend

FOLDERS = {"cpu": "host", "cuda": "cuda"}
"""The folder of each kind of device."""


def open_backend(kind: str, rank: int, threads: int) -> Backend:
    """The back end of a rank, opened once, in the thread that runs the rank's steps.

    `kind`: of the device, "cpu" or "cuda"; `threads`: of the host that the rank may use.

    Raises:
        ValueError: the device is not there.
    """
    module = importlib.import_module(f"{__name__}.{FOLDERS[kind]}.backend")
    return cast("Backend", module.open_backend(rank, threads))
