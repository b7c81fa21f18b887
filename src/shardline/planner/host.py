"""This host's CPU as the planner's hardware: its memory and its arithmetic are measured, in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shardline.deployment.machine import Machine
from shardline.planner.cluster import Cluster
from shardline.planner.hardware import GIB, Gpu, GpuLink
from shardline.planner.timing import Constants, Timing

_READ_BYTES = 64 << 20
"""What each thread reads: more than its share of a cache."""
_ROUNDS = 3
_MATRIX = 768
_NARROW = {"avx512_bf16": 2.0}
"""Operations in bf16 for each one in float32, by instruction set; others compute in float32."""
_SHARED_MEMORY_GBS = 20.0
"""What a rank receives from another one through shared memory."""

HOST_TIMING = Timing(
    Constants(
        memory=0.9,
        cache=0.5,
        compute=0.8,
        link=0.5,
        message=4e-6,
        launch=2e-6,
        step=2.5e-4,
        request=8e-6,
        first=5e-3,
        queue=0.68,
        attention=1.0,
        expanded=1.0,
        saturated=1.0,
    ),
    {"tpot": (0.7, 1.4), "ttft": (0.6, 2.0), "output_tok_s": (0.7, 1.4)},
)
"""Constants of this engine on a CPU, relative to what `measure_host` finds. See docs/planner.md for their errors."""


def measure_host(machine: Machine) -> Gpu:
    """All cores of the first host together, as one device."""
    host = machine.hosts[0]
    cpu = host.devices[host.of_kind("cpu")[0]]
    with ThreadPoolExecutor(host.cores) as threads:
        bandwidth = _read_rate(threads, host.cores)
        plain = _product_rate(threads, host.cores)
    return Gpu(
        vendor="this host",
        architecture="CPU",
        capability=cpu.capability,
        memory_gb=cpu.memory_total / 1e9,
        usable_gib=cpu.memory_free / GIB,
        bandwidth_gbs=bandwidth / 1e9,
        tflops={"bf16": plain * _NARROW.get(cpu.capability, 1.0) / 1e12, "fp32": plain / 1e12},
        link=GpuLink("memory", _SHARED_MEMORY_GBS, _SHARED_MEMORY_GBS, host.cores),
        pcie_gbs=_SHARED_MEMORY_GBS,
        network_gbs=1.0,
        source="measured",
        name="CPU",
    )


def share_host(whole: Gpu, ranks: int) -> Cluster:
    """The host as `ranks` equal devices: its cores, and what they read, are divided."""
    part = Gpu(
        **{
            **{name: getattr(whole, name) for name in whole.__struct_fields__},
            "bandwidth_gbs": whole.bandwidth_gbs / ranks,
            "tflops": {name: rate / ranks for name, rate in whole.tflops.items()},
            "memory_gb": whole.memory_gb / ranks,
            "usable_gib": whole.usable_gib / ranks,
        }
    )
    return Cluster((part,) * ranks, 1, whole.link, whole.network_gbs * 1e9)


def _read_rate(threads: ThreadPoolExecutor, cores: int) -> float:
    """Bytes per second that all cores read together."""
    arrays = [np.ones(_READ_BYTES // 8, dtype=np.int64) for _ in range(cores)]
    return cores * _READ_BYTES / _best(lambda: list(threads.map(np.max, arrays)))


def _product_rate(threads: ThreadPoolExecutor, cores: int) -> float:
    """Float32 operations per second of products on all cores."""
    matrices = [np.ones((_MATRIX, _MATRIX), dtype=np.float32) for _ in range(cores)]
    return cores * 2 * _MATRIX**3 / _best(lambda: list(threads.map(np.dot, matrices, matrices)))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some rounds."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
