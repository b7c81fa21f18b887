"""The start of an engine's process on the host of its first rank."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from shardline.channel import Channel
from shardline.deployment.deployment import Deployment
from shardline.engine.children import Child
from shardline.engine.ipc import StartEngine


@dataclass
class StartedEngine:
    """An engine's process, and the sockets that lead to it."""

    child: Child | None
    """None: the engine runs on another host, whose node watches it."""
    sock: socket.socket
    """The front's end of the engine's channel."""
    streams: dict[int, socket.socket]
    """For each rank on another host, the end that its node must be connected to."""


def start_engine(deployment: Deployment, engine: int, *, sends_start: bool = True) -> StartedEngine:
    """Start an engine's process on this host. With `sends_start`, this process is its front."""
    ours, theirs = socket.socketpair()
    pairs = {rank: socket.socketpair() for rank in deployment.remote_ranks(engine)}
    streams = [pair[0] for pair in pairs.values()]
    host = deployment.placements[engine][0].host
    gpus = deployment.gpus_of(engine, host)
    fds = [theirs.fileno(), *(sock.fileno() for sock in streams)]
    child = Child("shardline.engine.process", fds, gpus)
    for sock in (theirs, *streams):
        sock.close()
    if sends_start:
        Channel(ours, StartEngine).send(StartEngine(deployment, engine))
    return StartedEngine(child, ours, {rank: pair[1] for rank, pair in pairs.items()})
