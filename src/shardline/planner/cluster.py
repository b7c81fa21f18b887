"""What the user can rent: `--gpus 2x8xH100-80GB-SXM5`, as nodes with links, and as a `Machine` for `resolve`."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_struct

from shardline.deployment.machine import Device, Host, Machine
from shardline.planner.hardware import GB, Gpu, GpuLink, find_gpu

LINKS = ("nvlink", "bridge", "xgmi", "pcie")
_NETWORK = re.compile(r"(?:ib|roce|eth|gbe)-?(\d+(?:\.\d+)?)")
_PART = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([^,]+)", re.IGNORECASE)
_HOST_CORES = 64
_HOST_MEMORY = 1 << 50
"""Nobody says how much host memory the nodes have, so nothing is refused for it."""
_MOST_GPUS = 4096


@dataclass(frozen=True, eq=False)
class Cluster:
    """Equal nodes, each with the same GPUs."""

    gpus: tuple[Gpu, ...]
    """The GPUs of one node."""
    num_nodes: int
    link: GpuLink
    """The link inside a node."""
    network_bytes_per_second: float
    """Between nodes: one direction, each GPU."""
    host: Machine | None = None
    """This host, if the GPUs are its own; None: they are described only."""
    is_shared: bool = False
    """Whether all ranks share one device, of which each entry of `gpus` is the whole."""

    @property
    def num_gpus(self) -> int:
        return len(self.gpus) * self.num_nodes

    @property
    def slowest(self) -> Gpu:
        """The GPU with the least bandwidth. Ranks in lockstep wait for it."""
        return min(self.gpus, key=lambda gpu: gpu.bandwidth_gbs)

    @property
    def smallest(self) -> Gpu:
        return min(self.gpus, key=lambda gpu: gpu.usable_gib)

    @property
    def name(self) -> str:
        """As a user may write it."""
        counts: dict[str, int] = {}
        for gpu in self.gpus:
            counts[gpu.name] = counts.get(gpu.name, 0) + 1
        node = "+".join(f"{count}x{name}" for name, count in counts.items())
        return node if self.num_nodes == 1 else f"{self.num_nodes}x{node}"

    @property
    def price_per_hour(self) -> tuple[float, float] | None:
        """(low, high) US dollars for all GPUs; None: a price is not known."""
        prices = [gpu.price for gpu in self.gpus if gpu.price is not None]
        if len(prices) < len(self.gpus):
            return None
        low, high = sum(price.low for price in prices), sum(price.high for price in prices)
        return self.num_nodes * low, self.num_nodes * high

    def link_bytes_per_second(self, ranks: int) -> float:
        """What each of `ranks` neighbouring GPUs sends to the others together, in bytes per second of one direction."""
        if ranks > len(self.gpus):
            return self.network_bytes_per_second
        if ranks > self.link.domain:
            return self.slowest.pcie_gbs * GB
        return min(self.link.gbs, (ranks - 1) * self.link.pair_gbs or self.link.gbs) * GB

    def part(self, num_gpus: int) -> Cluster:
        """The first `num_gpus` GPUs: whole nodes, or a part of one."""
        return _share(self, num_gpus) if self.is_shared else _part(self, num_gpus)

    @property
    def cores(self) -> int:
        """Cores of this host."""
        assert self.host is not None
        return self.host.hosts[0].cores

    @property
    def host_summary(self) -> str:
        """What this host has."""
        if not self.is_shared:
            return f"{self.name}, {self.link.kind}"
        whole = self.gpus[0]
        rates = f"{whole.bandwidth_gbs:.0f} GB/s, {whole.tflops['bf16'] * 1e3:.0f} GFLOP/s"
        storage = f"; {whole.storage_gbs:.2f} GB/s of weights on a disk" if whole.storage_gbs else ""
        return f"{self.cores} cores, measured: {rates}{storage}"

    def machine(self, reserved: int) -> Machine:
        """The cluster as the engine's description of hardware. `reserved` bytes of every GPU are taken already."""
        return self.host or Machine(tuple(self._host(f"node{index}", reserved) for index in range(self.num_nodes)))

    def _host(self, name: str, reserved: int) -> Host:
        memory = sum(gpu.usable_bytes for gpu in self.gpus)
        devices = [Device("cpu", "CPU", memory, memory, cores=_HOST_CORES)]
        others = sorted({gpu.vendor for gpu in self.gpus} - {"NVIDIA"})
        if not others:
            for index, gpu in enumerate(self.gpus):
                total = gpu.usable_bytes
                devices.append(Device("cuda", gpu.name, total, total - reserved, gpu.capability, identifier=str(index)))
        why = f"Shardline has no back end for GPUs of {others[0]}; use vLLM" if others else ""
        return Host(name, _HOST_MEMORY, _HOST_CORES, tuple(devices), unusable_gpus=why)


def share_device(device: Gpu, ranks: int) -> Gpu:
    """The part of a device that each of `ranks` has: its arithmetic, its bandwidths and its memory are divided."""
    return replace_struct(
        device,
        bandwidth_gbs=device.bandwidth_gbs / ranks,
        tflops={name: rate / ranks for name, rate in device.tflops.items()},
        memory_gb=device.memory_gb / ranks,
        usable_gib=device.usable_gib / ranks,
        storage_gbs=device.storage_gbs / ranks,
    )


@functools.lru_cache(maxsize=64)
def _share(cluster: Cluster, num_ranks: int) -> Cluster:
    return replace(cluster, gpus=(share_device(cluster.gpus[0], num_ranks),) * num_ranks, is_shared=False)


@functools.lru_cache(maxsize=512)
def _part(cluster: Cluster, num_gpus: int) -> Cluster:
    if num_gpus <= len(cluster.gpus):
        return replace(cluster, gpus=cluster.gpus[:num_gpus], num_nodes=1)
    return replace(cluster, num_nodes=-(-num_gpus // len(cluster.gpus)))


def parse_cluster(
    text: str, gpus: Mapping[str, Gpu], link: str | None = None, inter_node: str | None = None
) -> Cluster:
    """The cluster that `--gpus`, `--link` and `--inter-node` describe. A name without a count is one GPU.

    Raises:
        ValueError: the text has another form, a GPU is unknown, or it cannot have the link.
    """
    node: list[Gpu] = []
    num_nodes = 1
    parts = text.split("+")
    for part in parts:
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"--gpus {text!r}: write for example 4xH100-80GB, 2x8xH100-80GB-SXM5 or A100+2xL40S")
        first, second, name = match.groups()
        if second is not None and len(parts) > 1:
            raise ValueError(f"--gpus {text!r}: a sum describes one node; write for example 2xL40S+A100-80GB-PCIe")
        nodes, count = (int(first), int(second)) if second is not None else (1, int(first or 1))
        if nodes * count < 1 or nodes * count > _MOST_GPUS:
            raise ValueError(f"--gpus {text!r}: there must be 1 to {_MOST_GPUS} GPUs")
        num_nodes = nodes
        node += [find_gpu(name, gpus, link)] * count
    used = _choose_link(node, link)
    network = min(gpu.network_gbs for gpu in node) * GB if inter_node is None else _network_rate(inter_node)
    return Cluster(tuple(node), num_nodes, used, network)


def _network_rate(text: str) -> float:
    """Bytes per second of a network such as "ib-400": gigabits per second for each GPU.

    Raises:
        ValueError: the text has another form.
    """
    match = _NETWORK.fullmatch(text.lower())
    if match is None or float(match.group(1)) <= 0:
        raise ValueError(f"--inter-node {text!r}: write the kind and gigabits per second of a GPU, for example ib-400")
    return float(match.group(1)) * GB / 8


def can_link(gpu: Gpu, link: str | None) -> bool:
    """Whether a GPU can have the link; None: its own.

    Raises:
        ValueError: there is no such link.
    """
    if link not in (None, *LINKS):
        raise ValueError(f"--link {link!r}: must be one of {', '.join(LINKS)}")
    return bool(gpu.bridge_gbs) if link == "bridge" else link in (None, "pcie", gpu.link.kind)


def _choose_link(node: list[Gpu], wanted: str | None) -> GpuLink:
    """The link inside a node: the wanted one, else the GPUs' own if all have the same, else PCIe.

    Raises:
        ValueError: a GPU cannot have the link.
    """
    rate = min(gpu.pcie_gbs for gpu in node)
    pcie = GpuLink("pcie", rate, rate, len(node))
    own = min((gpu.link for gpu in node), key=lambda link: link.gbs)
    if wanted is None:
        return own if len({gpu.link.kind for gpu in node}) == 1 else pcie
    if wanted == "pcie":
        return pcie
    for gpu in node:
        if not can_link(gpu, wanted):
            extra = " or bridge" if gpu.bridge_gbs else ""
            choices = " or ".join(dict.fromkeys((gpu.link.kind, "pcie"))) + extra
            raise ValueError(f"--link {wanted}: {gpu.name} cannot have it; use {choices}")
    if wanted == "bridge":
        rate = min(gpu.bridge_gbs for gpu in node)
        return GpuLink("bridge", rate, rate, domain=2)
    return own
