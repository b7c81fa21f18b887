"""What nodes of tests say of themselves."""

from __future__ import annotations

import secrets
from typing import Any, cast

from msgspec.structs import replace

from shardline.cluster.wire import FrameSocket
from shardline.messages.node import Join, StartHead


def start(own: Join, **options: Any) -> StartHead:
    """The start of a head that waits for nodes 1 and 2."""
    usual: dict[str, Any] = {"token": "t", "address": "10.0.0.1", "port": 1, "nodes": (1, 2), "num_replicas": 0}
    return StartHead(own=own, **(usual | options))


def peer() -> FrameSocket:
    """What stands for a connection where nothing is sent."""
    return cast(FrameSocket, object())


def node(own: Join, number: int, **changes: Any) -> Join:
    """The node of a process of its own, like the head, with another name and address."""
    host = {"name": f"host{number}", "address": f"10.0.0.{number + 1}", **changes.pop("host", {})}
    changes = {"process": secrets.token_bytes(8), **changes}
    return replace(own, node=number, host=replace(own.host, **host), **changes)
