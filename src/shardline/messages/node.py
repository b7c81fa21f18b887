"""The messages between a head and its nodes, a front and its head process, and a front and what places nodes by Ray."""

from __future__ import annotations

import msgspec

from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment, ModelSource
from shardline.deployment.machine import Host

ENGINE = -1
"""The `rank` of a stream that leads to an engine."""


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """A channel between processes on two hosts: of a front and an engine, or of an engine and a rank."""

    engine: int
    rank: int
    """ENGINE: between the front and the engine."""
    start: int
    """The front's number for this start of the engine, so that nothing of an earlier start is taken for its own."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """Node to head, first message: what this node is and has."""

    node: int
    """--node-rank, or --data-parallel-start-rank."""
    software: dict[str, str]
    """Versions that must be equal on all nodes."""
    flags: dict[str, str]
    """Flags that must be equal on all nodes."""
    isas: tuple[str, ...]
    """The CPU kernel paths that this node has."""
    host: Host
    model: ModelSource
    weights_digest: str
    """A digest of the names, sizes and headers of the weight files."""
    process: bytes = b""
    """Drawn when the node starts, so that the head knows a node that has given up its connection and joins again."""


class ForeignHost(msgspec.Struct, frozen=True):
    """What a head needs of the `Host` in another version's Join."""

    name: str
    address: str


class ForeignJoin(msgspec.Struct, frozen=True, tag="Join"):
    """The fields of Join that no version may change, so that a head can refuse a node of any version by its name."""

    software: dict[str, str]
    host: ForeignHost


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """Node to head, instead of Join or at any later time: the node cannot serve, and ends. The answer is Refused."""

    name: str
    """The name of its host."""
    address: str
    why: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Head to node: the node belongs to the cluster."""

    isa: str
    """The CPU kernel path of the node. All nodes have the same one, but perhaps not with `--numerics fast`."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Head to node: the node cannot belong to the cluster. No version may change this message."""

    message: str


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """Head to node: the head does not know it, or no longer does. The node ends its ranks and joins anew."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Head to nodes, front to head: what runs where."""

    deployment: Deployment


class StartStream(msgspec.Struct, frozen=True, tag=True):
    """Start the process at the far end of a stream, and connect it."""

    stream: Stream


class StreamData(msgspec.Struct, frozen=True, tag=True):
    """Frames of a stream."""

    stream: Stream
    bodies: list[bytes]


class StreamEnded(msgspec.Struct, frozen=True, tag=True):
    """One end of a stream is closed."""

    stream: Stream


class HostLost(msgspec.Struct, frozen=True, tag=True):
    """Head to nodes: a host of the deployment is gone, and with it the far ends of its streams."""

    host: int
    why: str
    """Words that follow the name of a process on it."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Both ways, once a second: the sender lives. A node answers a head's beat at once.

    A network that drops packets in one direction still brings what was sent before, again and late. So the head counts
    only answers to its own beats.
    """

    sent: float = 0.0
    """When the head sent the beat, or the last one that the node has got, on the head's clock; 0: none yet."""


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Head to node: accept one connection, which begins with `key`, and count its bytes."""

    key: bytes


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Node to head."""

    port: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Head to node: connect to a listening host, and measure."""

    address: str
    port: int
    key: bytes
    seconds: float
    """How long to send."""


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Node to head: what came of Connect, or of Listen if there is an error."""

    latency: float = 0.0
    """Seconds of a round trip of one byte."""
    bytes_per_second: float = 0.0
    error: str = ""


class LinkMeasured(msgspec.Struct, frozen=True, tag=True):
    """Head process to front: a link between two hosts of the deployment."""

    hosts: tuple[int, int]
    measured: Measured


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Node to head: it ends, because somebody has asked it to."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Head to nodes, front to head: end with this exit code."""

    code: int
    reason: str


NodeMessage = Join | Unfit | StartStream | StreamData | StreamEnded | Beat | Listening | Measured | Leave
HeadMessage = (
    Accepted
    | Refused
    | Rejoin
    | Launch
    | StartStream
    | StreamData
    | StreamEnded
    | HostLost
    | Beat
    | Listen
    | Connect
    | Shutdown
)


class StartHead(msgspec.Struct, frozen=True, tag=True):
    """Front to head process, first message."""

    token: str
    address: str
    port: int
    own: Join
    """What the head's own host is and has."""
    nodes: tuple[int, ...]
    """The nodes to wait for; empty: until all replicas have a node."""
    num_replicas: int
    """The replicas to wait for, the head's own included; 0: nodes are waited for by number."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Head process to front: all nodes are there."""

    nodes: tuple[Join, ...]
    """In the order of their numbers, without the head itself."""


class HeadFailed(msgspec.Struct, frozen=True, tag=True):
    """Head process to front: it cannot go on."""

    message: str
    user_error: bool


class NodesPresent(msgspec.Struct, frozen=True, tag=True):
    """Head process to front: the hosts that are there now, by their index in the deployment."""

    hosts: tuple[int, ...]
    nodes: tuple[Join, ...]
    """What they are now, without the head itself. A node that comes back may be on another host."""


FrontToHead = StartHead | Launch | Shutdown
HeadToFront = Joined | HeadFailed | NodesPresent | LinkMeasured


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
