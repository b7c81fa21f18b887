"""How fast this host's CPU multiplies, and how fast weights come from its disk. The engine's own product is timed, and
torch is not needed.

A BLAS library would tell less: it has other kernels, and threads of its own.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from shardline import _cpu, env
from shardline.kernels.memory import map_memory

_DEPTH = 1024
_ROWS = 256
"""Of the product that is bound by arithmetic; the other one has a single row."""
_COLUMNS_PER_THREAD = 2048
_READ_BYTES = 128 << 20
_READ_BYTES_PER_THREAD = 32 << 20
"""A product with one row reads at least so much: more than caches hold."""
_SECONDS = 0.04
"""Time of one measurement, without the time to fill its memory."""
_STORED_BYTES = 256 << 20
"""Of a file that is read to measure a disk."""
_CHUNK = 8 << 20
_READERS = 2
"""Pieces in which weights are read, and the threads that read them in turn."""


class CpuRates(NamedTuple):
    """Rates of some threads together, each per second."""

    weight_bytes: float
    """Bytes of weights that a product reads."""
    bf16: float
    """Operations with weights in bfloat16."""
    fp32: float
    """Operations with weights in float32."""


def measure_rates(threads: int) -> CpuRates:
    """The best rates of `threads` threads of this process, in a fraction of a second."""
    forced, before = env.force_isa(), _cpu.num_threads()
    if forced:
        _cpu.set_isa(forced)
    _cpu.set_num_threads(threads)
    try:
        read = max(_READ_BYTES, threads * _READ_BYTES_PER_THREAD)
        weight_bytes = read / _cpu.product_seconds(1, read // (2 * _DEPTH), _DEPTH, True, _SECONDS)
        columns = threads * _COLUMNS_PER_THREAD
        flops = 2 * _ROWS * columns * _DEPTH
        bf16, fp32 = (
            flops / _cpu.product_seconds(_ROWS, columns, _DEPTH, narrow, _SECONDS) for narrow in (True, False)
        )
    finally:
        _cpu.set_num_threads(before)
    return CpuRates(weight_bytes, bf16, fp32)


def storage_rate(folder: Path) -> float:
    """Bytes a second at which weights would be read from files in a folder: past the page cache, where that works.

    Raises:
        ValueError: no file can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="shardline-rate-") as file:
            chunk = os.urandom(_CHUNK)
            for _ in range(_STORED_BYTES // _CHUNK):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return _STORED_BYTES / min(_read_seconds(file.name) for _ in range(2))
    except OSError as error:
        raise ValueError(
            f"offload_to: a file of {_STORED_BYTES >> 20} MiB, to measure the disk, cannot be written to {folder}: "
            f"{error.strerror}; free as much, or give `plan` the rate as --storage-gbs"
        ) from None


def _read_seconds(name: str) -> float:
    """The time that readers need for the whole file."""

    def read(first: int, direct: int) -> None:
        descriptor = os.open(name, os.O_RDONLY | direct)
        try:
            with map_memory(_CHUNK) as memory:
                for offset in range(first * _CHUNK, _STORED_BYTES, _READERS * _CHUNK):
                    os.preadv(descriptor, [memory], offset)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(_READERS) as pool:
        for direct in (os.O_DIRECT, 0):  # such as a tmpfs has no direct reads
            started = time.perf_counter()
            with contextlib.suppress(OSError):
                list(pool.map(read, range(_READERS), [direct] * _READERS))
                return time.perf_counter() - started
    raise OSError(None, f"{name} cannot be read")
