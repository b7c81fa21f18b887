"""The hardware that a deployment may use, as data. `probe` fills it in for this host; tests and planners write it."""

from __future__ import annotations

from typing import Literal

import msgspec

DeviceKind = Literal["cpu", "cuda"]


class Device(msgspec.Struct, frozen=True):
    """Something that computes: all cores of a host, or one GPU."""

    kind: DeviceKind
    name: str
    """For people."""
    memory_total: int
    """Bytes; of the host's memory for a CPU."""
    memory_free: int
    """Bytes that can still be had."""
    capability: str = ""
    """What its kernels may use: the instruction set of a CPU ("avx512_bf16"), the architecture of a GPU ("sm_90").
    Empty: unknown."""
    cores: int = 0
    """Cores of a CPU that this process may use; 0: unknown."""
    numa_node: int = -1
    """The NUMA node that it is nearest to; -1: unknown, or several."""
    identifier: str = ""
    """What CUDA_VISIBLE_DEVICES calls a GPU."""


class Host(msgspec.Struct, frozen=True):
    """One computer, or the container on it that this process runs in."""

    name: str
    free_memory: int
    """Bytes of its memory that can still be had."""
    cores: int
    """Cores that this process may use."""
    devices: tuple[Device, ...]
    num_numa_nodes: int = 1
    unusable_gpus: str = ""
    """Why GPUs that are there are not among `devices`, and what to do about it; empty: there are none."""

    def of_kind(self, kind: DeviceKind) -> tuple[int, ...]:
        """Indices of the devices of one kind."""
        return tuple(index for index, device in enumerate(self.devices) if device.kind == kind)


class DeviceIndex(msgspec.Struct, frozen=True):
    """One device of a machine."""

    host: int
    device: int


class Link(msgspec.Struct, frozen=True):
    """A connection between two devices."""

    ends: tuple[DeviceIndex, DeviceIndex]
    kind: Literal["nvlink", "pcie", "memory", "network"]
    bytes_per_second: int = 0
    """In one direction; 0: unknown."""


class Machine(msgspec.Struct, frozen=True):
    """The hosts of a deployment. The first is the one on which the front runs."""

    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = ()
    """Those that are known."""
