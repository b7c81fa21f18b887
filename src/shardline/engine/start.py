"""Starts an engine's process, and the sockets that lead to it and to its ranks on other hosts."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from shardline.channel import Channel
from shardline.deployment.deployment import Deployment
from shardline.engine.children import Child
from shardline.messages.engine import StartEngine


@dataclass
class StartedEngine:
    """An engine's process, and the sockets that lead to it."""

    child: Child | None
    """None: the engine runs on another host, whose node watches it."""
    sock: socket.socket
    """The front's end of the engine's channel."""
    streams: dict[int, socket.socket]
    """For each rank on another host, the end that its node must be connected to."""


def start_engine(deployment: Deployment, engine: int, secret: bytes | None) -> StartedEngine:
    """Start an engine's process on this host. `secret`: see `StartEngine`; None: its front is another process."""
    host = deployment.placements[engine][0].host
    # A start that fails for want of a descriptor must keep none.
    with contextlib.ExitStack() as inherited, contextlib.ExitStack() as kept:
        ours, theirs = _open_pair(kept, inherited)
        pairs = {rank: _open_pair(kept, inherited) for rank in deployment.remote_ranks(engine)}
        fds = [theirs.fileno(), *(sock.fileno() for _, sock in pairs.values())]
        child = Child("shardline.engine.process", fds, deployment.gpus_of(engine, host))
        if secret is not None:
            Channel(ours, StartEngine).send(StartEngine(deployment, engine, secret))
        kept.pop_all()
    return StartedEngine(child, ours, {rank: sock for rank, (sock, _) in pairs.items()})


def _open_pair(kept: contextlib.ExitStack, inherited: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: one that this process keeps, and one for the engine's."""
    ours, theirs = socket.socketpair()
    return kept.enter_context(ours), inherited.enter_context(theirs)
