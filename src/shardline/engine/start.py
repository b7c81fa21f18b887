"""The start of an engine's process on the host of its first rank."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from shardline.channel import Channel
from shardline.deployment.deployment import Deployment
from shardline.deployment.machine import DeviceKind
from shardline.engine.children import Child
from shardline.engine.forks import Forks
from shardline.engine.ipc import StartEngine
from shardline.runtime.backends import backend_module, can_fork

_GRACE = 10.0
"""Seconds that an engine may outlive its front; it ends itself within five."""


@dataclass
class StartedEngine:
    """An engine's process, and the sockets that lead to it."""

    child: Child | None
    """None: the engine runs on another host, whose node watches it."""
    sock: socket.socket
    """The front's end of the engine's channel."""
    streams: dict[int, socket.socket]
    """For each rank on another host, the end that its node must be connected to."""


def modules_to_import(device: DeviceKind) -> list[str]:
    """What engines and ranks on a kind of device import, for a fork server; empty: they cannot be forked."""
    if not can_fork(device):
        return []
    return [
        "shardline.engine.process",
        "shardline.engine.executor.multiprocess",
        "shardline.engine.executor.uni",
        "shardline.runtime.worker_process",
        "shardline.runtime.worker",
        "shardline.runtime.parallel.groups",
        "shardline.runtime.parallel.interface",
        "shardline.runtime.parallel.rendezvous",
        "shardline.runtime.parallel.torch_store",
        "shardline.seal",
        backend_module(device),
    ]


def start_engine(
    deployment: Deployment, engine: int, *, sends_start: bool = True, forks: Forks | None = None
) -> StartedEngine:
    """Start an engine's process on this host. With `sends_start`, this process is its front.

    `forks`: starts the engine and its ranks if its server is ready.
    """
    ours, theirs = socket.socketpair()
    pairs = {rank: socket.socketpair() for rank in deployment.remote_ranks(engine)}
    streams = [pair[0] for pair in pairs.values()]
    host = deployment.placements[engine][0].host
    gpus = deployment.gpus_of(engine, host)
    fds = [theirs.fileno(), forks.fileno() if forks else -1, *(sock.fileno() for sock in streams)]
    child = Child("shardline.engine.process", fds, gpus, forks, _GRACE)
    for sock in (theirs, *streams):
        sock.close()
    if sends_start:
        Channel(ours, StartEngine).send(StartEngine(deployment, engine))
    return StartedEngine(child, ours, {rank: pair[1] for rank, pair in pairs.items()})
