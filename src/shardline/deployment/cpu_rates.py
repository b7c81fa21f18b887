"""How fast this host's CPU multiplies. The engine's own product is timed, and torch is not needed.

A BLAS library would tell less: it has other kernels, and threads of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from shardline import _cpu, env

_DEPTH = 1024
_ROWS = 256
"""Of the product that is bound by arithmetic; the other one has a single row."""
_COLUMNS_PER_THREAD = 2048
_READ_BYTES = 128 << 20
_READ_BYTES_PER_THREAD = 32 << 20
"""A product with one row reads at least so much: more than caches hold."""
_SECONDS = 0.04
"""Time of one measurement, without the time to fill its memory."""


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
