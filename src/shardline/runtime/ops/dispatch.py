"""Which CPU kernels run, and on how many threads."""

from __future__ import annotations

from collections.abc import Sequence

from shardline import _cpu


def isa() -> str:
    """The kernels in use: "portable", "avx2", "avx512" or "avx512_bf16". Part of a response's fingerprint."""
    return _cpu.isa()


def available_isas() -> list[str]:
    """What this CPU can run, best last."""
    return _cpu.available_isas()


def set_isa(name: str) -> None:
    """Use other kernels in the whole process: ranks agree on the lowest that all of them have."""
    _cpu.set_isa(name)


def num_threads() -> int:
    return _cpu.num_threads()


def set_num_threads(num_threads: int, pin: Sequence[int] = ()) -> None:
    """Threads for ops called from the calling thread, itself included; 1 until set.

    The pool belongs to the calling thread, so that ranks can be threads of one process. `pin` names one CPU per
    thread, the caller's first; without it threads run wherever the process may.
    """
    _cpu.set_num_threads(num_threads, list(pin))
