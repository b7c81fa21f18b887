"""This host's CPU as the planner's hardware: the engine's own product is timed, in a fraction of a second."""

from __future__ import annotations

from shardline.deployment.cpu_rates import measure_rates
from shardline.deployment.machine import Machine
from shardline.planner.cluster import Cluster
from shardline.planner.constants import Constants
from shardline.planner.hardware import GIB, Gpu, GpuLink
from shardline.planner.timing import Timing

_SHARED_MEMORY_GBS = 20.0
"""What a rank receives from another one through shared memory."""

HOST_TIMING = Timing(
    Constants(
        memory=0.95,
        cache=0.5,
        compute=0.95,
        link=0.5,
        message=4e-6,
        launch=2e-6,
        step=2.5e-4,
        request=8e-6,
        first=1e-3,
        shown=0.0,
        together=0.15,
        queue=0.5,
        attention=1.0,
        expanded=1.0,
        saturated=1.0,
    ),
    {"tpot": (0.7, 1.4), "ttft": (0.6, 2.0), "output_tok_s": (0.7, 1.4)},
)
"""Constants of this engine on a CPU, relative to what `measure_host` finds. See docs/planner.md for their errors."""


def measure_host(machine: Machine, threads: int | None = None) -> Gpu:
    """`threads` cores of the first host together, as one device; None: all cores."""
    host = machine.hosts[0]
    cpu = host.devices[host.of_kind("cpu")[0]]
    rates = measure_rates(threads or host.cores)
    return Gpu(
        vendor="this host",
        architecture="CPU",
        capability=cpu.capability,
        memory_gb=cpu.memory_total / 1e9,
        usable_gib=cpu.memory_free / GIB,
        bandwidth_gbs=rates.weight_bytes / 1e9,
        tflops={"bf16": rates.bf16 / 1e12, "fp32": rates.fp32 / 1e12},
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
