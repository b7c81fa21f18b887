"""Which nodes of a Ray cluster get which share of a layout. Pure: Ray's nodes are data here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardline.config.engine import EngineConfig

Resource = Literal["CPU", "GPU"]


@dataclass(frozen=True)
class RayHost:
    node_id: str
    address: str
    total: dict[str, float]
    """The amount of each of its resources."""
    free: dict[str, float]
    """What of it nobody has reserved."""


_RESOURCES: Mapping[str, Resource] = {"cuda": "GPU", "cpu": "CPU"}
"""Ray's names for the devices that ranks run on."""


@dataclass(frozen=True)
class Demand:
    """What a layout reserves: one bundle for each tensor-parallel group."""

    resource: Resource
    amount: int
    """How much of the resource one group needs."""
    num_groups: int
    group_size: int
    """Ranks of one group."""

    def room_on(self, host: RayHost) -> int:
        """Groups for which a host has room."""
        return int(host.free.get(self.resource, 0.0) // self.amount)


@dataclass(frozen=True)
class Share:
    host: RayHost
    num_groups: int


def demand_of(config: EngineConfig, hosts: Sequence[RayHost]) -> Demand:
    """What a configuration needs. With `--device auto`, ranks use GPUs if any node has one."""
    parallel = config.parallel
    has_gpus = any(host.total.get("GPU", 0.0) >= 1.0 for host in hosts)
    resource = _RESOURCES.get(parallel.device, "GPU" if has_gpus else "CPU")
    size = parallel.sharing
    groups = parallel.pipeline_parallel_size * parallel.data_parallel_size
    amounts = {"GPU": size, "CPU": size * (parallel.cpu_threads or 1)}
    return Demand(resource, amounts[resource], groups, size)


def share_groups(demand: Demand, hosts: Sequence[RayHost], own_id: str) -> list[Share]:
    """A share for each host that is used. The front's own host, `own_id`, is filled first, then the emptiest ones.

    Raises:
        ValueError: there is no room; the message says what there is, and what is missing.
    """
    order = sorted(hosts, key=lambda host: (host.node_id != own_id, -demand.room_on(host), host.address))
    shares, left = [], demand.num_groups
    for host in order:
        if count := min(left, demand.room_on(host)):
            shares.append(Share(host, count))
            left -= count
    if left:
        raise ValueError(_too_small(demand, hosts, left))
    return shares


def find_host(demand: Demand, num_groups: int, hosts: Sequence[RayHost], avoided: frozenset[str]) -> RayHost | None:
    """The emptiest host with room for groups, without the avoided ones (node ids); None: there is none."""
    fitting = [host for host in hosts if host.node_id not in avoided and demand.room_on(host) >= num_groups]
    return max(fitting, key=lambda host: (demand.room_on(host), host.address), default=None)


def _too_small(demand: Demand, hosts: Sequence[RayHost], left: int) -> str:
    found = ", ".join(
        f"{host.address} {host.free.get(demand.resource, 0.0):g} of {host.total.get(demand.resource, 0.0):g}"
        for host in sorted(hosts, key=lambda host: host.address)
    )
    what = f"{demand.num_groups} tensor-parallel groups of {demand.amount} {demand.resource}s, each on one node"
    return (
        f"Ray has too few free {demand.resource}s: this layout needs {what}, and {left} of them find no place; free "
        f"are: {found or 'none'}. Add a node (ray start --address=...), end other jobs, or use fewer ranks"
    )


def config_of_node(config: EngineConfig, number: int, num_nodes: int, address: str) -> EngineConfig:
    """The configuration of one node of those that Ray has chosen; 0 is the front's. `address`: of the front's host."""
    cluster = dataclasses.replace(
        config.cluster, nnodes=num_nodes, node_rank=number, master_addr=address if num_nodes > 1 else None
    )
    return dataclasses.replace(config, cluster=cluster)
