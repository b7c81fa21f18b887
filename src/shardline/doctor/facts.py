"""What the doctor knows about a node, and what it finds. Checks are functions of facts, so tests write their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from shardline.deployment.interconnect import GpuLinks
from shardline.deployment.machine import Host

Verdict = Literal["ok", "warning", "broken"]
UNLIMITED = -1


class Finding(msgspec.Struct, frozen=True):
    where: str
    """A node, or the two nodes of a link."""
    item: str
    verdict: Verdict
    text: str
    """What was found."""
    fix: str = ""
    """What to do about it; empty for ok."""


class Port(msgspec.Struct, frozen=True):
    """A port on which this node is to listen."""

    flag: str
    address: str
    number: int
    error: str = ""
    """Why it cannot be used; empty: it is free."""
    served: str = ""
    """What a Shardline server on it says of itself, for example "ready"; empty: there is none."""


class ModelFacts(msgspec.Struct, frozen=True):
    """The model on a node."""

    name: str
    folder: str = ""
    """Empty: the model is not here."""
    digest: str = ""
    """Of config.json and of the weight files' names and sizes."""
    error: str = ""
    """What is wrong with its files."""
    cache: str = ""
    """The folder to which it would be downloaded."""
    cache_free: int = 0
    """Free bytes on the disk of that folder."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    node: int
    """--node-rank, or --data-parallel-start-rank; -1: a head without ranks."""
    num_nodes: int
    """1: there is no cluster; 0: nodes are counted by their replicas."""
    host: Host
    address_error: str = ""
    software: dict[str, str] = {}
    """Versions that must be equal on all nodes."""
    build: str = ""
    """A digest of Shardline's Python files: two builds may have one version."""
    flags: dict[str, str] = {}
    """Flags that must be equal on all nodes."""
    isas: tuple[str, ...] = ()
    known_answers: dict[str, str] = {}
    """For each kernel path, a digest of what it computes."""
    known_answers_error: str = ""
    gpus: GpuLinks = GpuLinks()
    shm_bytes: int = 0
    """Size of /dev/shm; 0: there is none."""
    memlock: int = UNLIMITED
    """Bytes that the process may lock in memory."""
    has_ipc_lock: bool = False
    """Whether it has the capability IPC_LOCK, with which it may lock any amount."""
    open_files: int = UNLIMITED
    open_files_hard: int = UNLIMITED
    max_connections: int = 0
    """Requests that the server takes at once, each over a connection."""
    name_addresses: tuple[str, ...] = ()
    """The addresses to which the host's own name resolves."""
    ports: tuple[Port, ...] = ()
    model: ModelFacts = ModelFacts("demo")
    rdma: tuple[str, ...] = ()
    """Active InfiniBand or RoCE ports, with their rates."""
    nccl: dict[str, str] = {}
    """The NCCL_* variables of the environment."""
    nccl_speed: float = 0.0
    """Bytes per second that each GPU receives while all GPUs of the node gather; 0: not measured."""
    nccl_error: str = ""
    """Why they could not gather."""

    @property
    def name(self) -> str:
        """The node for reports."""
        if self.num_nodes == 1:
            return self.host.name
        return f"{self.label} ({self.host.name}, {self.host.address or 'no address'})"

    @property
    def label(self) -> str:
        """The node in few words."""
        return "head" if self.node < 0 else f"node {self.node}"

    @property
    def gpu_names(self) -> list[str]:
        return [self.host.devices[index].name for index in self.host.of_kind("cuda")]


class Link(msgspec.Struct, frozen=True):
    """What was measured from one node to another."""

    source: int
    target: int
    latency: float = 0.0
    """Seconds of a round trip of one byte."""
    bytes_per_second: float = 0.0
    error: str = ""
    """Why no connection came about."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """What the doctor says, the same on all nodes."""

    findings: tuple[Finding, ...]
    nodes: tuple[NodeFacts, ...]
    links: tuple[Link, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return worst([finding.verdict for finding in self.findings])


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    order: tuple[Verdict, ...] = ("broken", "warning", "ok")
    return next((verdict for verdict in order if verdict in verdicts), "ok")
