"""The messages between a front, its Ray driver process, and the node processes that Ray's actors start."""

from __future__ import annotations

import dataclasses

import msgspec

from shardline.config.engine import EngineConfig
from shardline.messages.node import NodesPresent


class StartDriver(msgspec.Struct, frozen=True, tag=True):
    """Front to driver, first message."""

    config: EngineConfig
    token: str
    """The join token of this launch."""
    groups: tuple[int, ...]
    """The tensor-parallel groups of each node, the front's host first, if an earlier driver has chosen; else empty."""


class Placed(msgspec.Struct, frozen=True, tag=True):
    """Driver to front: Ray has reserved everything."""

    address: str
    """Ray's address of the front's host."""
    groups: tuple[int, ...]
    """The tensor-parallel groups of each node, the front's host first."""
    group_size: int
    """Ranks of one group."""
    gpus: str | None
    """CUDA_VISIBLE_DEVICES for the front's host; None: its ranks use no GPUs."""


class DriverFailed(msgspec.Struct, frozen=True, tag=True):
    """Driver to front: it cannot place the layout, or a node cannot run its part."""

    message: str
    user_error: bool


class StartNode(msgspec.Struct, frozen=True):
    """Actor to node process, its only message."""

    config: EngineConfig
    token: str
    settings: dict[str, str]
    """Environment variables of the front that all nodes share."""


FrontToDriver = StartDriver | NodesPresent
DriverToFront = Placed | DriverFailed


def config_of_node(config: EngineConfig, number: int, num_nodes: int, address: str) -> EngineConfig:
    """The configuration of one node of those that Ray has chosen; 0 is the front's. `address`: of the front's host."""
    cluster = dataclasses.replace(
        config.cluster, nnodes=num_nodes, node_rank=number, master_addr=address if num_nodes > 1 else None
    )
    return dataclasses.replace(config, cluster=cluster)
