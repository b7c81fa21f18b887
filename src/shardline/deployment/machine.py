"""The hardware that a deployment may use, as data. `probe` describes this host; tests and planners write their own."""

from __future__ import annotations

from typing import Literal

import msgspec

DeviceKind = Literal["cpu", "cuda", "xpu", "mps"]


class Device(msgspec.Struct, frozen=True):
    """Something that computes: all cores of a host, or one GPU."""

    kind: DeviceKind
    name: str
    """A name for messages."""
    memory_total: int
    """Bytes; for a CPU, of the host's memory."""
    memory_free: int
    """Bytes that are available."""
    capability: str = ""
    """A CPU's instruction set ("avx512_bf16") or a GPU's architecture ("sm_90"), for its kernels; empty: unknown."""
    cores: int = 0
    """Cores of a CPU that this process may use; 0: unknown."""
    identifier: str = ""
    """The name of a GPU in CUDA_VISIBLE_DEVICES."""


class Host(msgspec.Struct, frozen=True):
    """One computer, or the container on it in which this process runs."""

    name: str
    free_memory: int
    """Bytes of its memory that are available."""
    cores: int
    """Cores that this process may use."""
    devices: tuple[Device, ...]
    address: str = ""
    """The address at which other hosts reach it; empty if there are no others."""
    num_replicas: int = 0
    """The replicas that it is to run, if hosts say how many; 0 on all hosts: they share them out evenly."""
    num_ranks: int = 0
    """The ranks that it is to run, if Ray has chosen it; 0 on all hosts: `num_replicas` counts."""
    unusable_gpus: str = ""
    """If the host has GPUs that are not among `devices`: why, and what to do about it. Otherwise empty."""

    @property
    def gpu_architectures(self) -> tuple[str, ...]:
        """The architectures of its GPUs, each once."""
        return tuple(sorted({device.capability for device in self.devices if device.kind == "cuda"}))

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
    """The known links."""
