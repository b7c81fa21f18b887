"""Back ends: one folder per kind of machine; `base.py` is the contract. Importing this package imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import Tensor

    from shardline.models.stored_layout import Codes
    from shardline.runtime.backends.base import Backend

_FOLDERS = {"cpu": "host"}
"""Kinds of device whose folder has another name."""


def open_backend(kind: str, rank: int, threads: int) -> Backend:
    """The back end of a rank, opened once, in the thread that runs the rank's steps.

    `kind`: the kind of device, which names its folder; `threads`: number of host threads that the rank may use.

    Raises:
        ValueError: there is no such device.
    """
    return cast("Backend", importlib.import_module(backend_module(kind)).open_backend(rank, threads))


def backend_module(kind: str) -> str:
    """The name of the module that opens a kind of device."""
    return f"{__name__}.{_FOLDERS.get(kind, kind)}.backend"


def reserve_memory(num_bytes: int, touched_bytes: int) -> None:
    """Begin to reserve host memory for weights, before torch is imported. Does nothing if `touched_bytes` is 0."""
    if touched_bytes:
        from shardline.runtime.backends.host.reserve import weight_reserve

        weight_reserve.fill_memory(num_bytes, touched_bytes)


def unpack_blocks(blocks: Tensor, kind: int, codes: Tensor, scales: Tensor | None, mins: Tensor | None) -> None:
    """Unpack rows of blocks of GGUF on the host, of the type with the number `kind`.

    `blocks` [N, bytes] uint8 become `codes` [N, K] uint8, those of Q8_0 plus 128, and the small `scales` and `mins` of
    groups [N, G] int8, if the type has them.

    Raises:
        ValueError: there is no such packed type, or the tensors do not fit it.
    """
    from shardline import _cpu

    _cpu.unpack_blocks(blocks, kind, codes, scales, mins)


def unpack_words(words: Tensor, codes: Tensor, layout: Codes) -> None:
    """Unpack numbers of 4 or 8 bits on the host: `words` [M, W] int32 or uint8, as the file stores them, become `codes`
    [rows, columns] uint8, those that `layout` says.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    from shardline import _cpu

    along_rows = layout.along == "rows"
    _cpu.unpack_words(words, codes, layout.bits, layout.order, layout.offset % 256, along_rows, layout.transposed)
