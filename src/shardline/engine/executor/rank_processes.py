"""The processes of an engine's ranks, here and on other hosts: their start, their names in messages, and their end."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping

from shardline.channel import Channel
from shardline.deployment.deployment import Deployment
from shardline.deployment.segment import segment_layout
from shardline.engine.children import Child
from shardline.messages.worker import RankBeat, RankEnded, RankStarted, StartWorker, WorkerReply
from shardline.segment.activity import Activity


class RemoteRank:
    """What is known of a rank on another host. Its node reports it over the rank's own channel."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.pid = 0
        self.activity = Activity()
        self.end = ""
        self.code: int | None = None
        """The exit code; None: unknown."""
        self.host_lost = False


class RankProcesses:
    """One process per rank, and the memory segment that the ranks of this host share."""

    def __init__(
        self,
        deployment: Deployment,
        engine: int,
        streams: Mapping[int, int],
        send_timeout: float,
    ) -> None:
        """`streams`: for each rank on another host, the descriptor of the socket that leads to it.

        `send_timeout`: seconds after which a message that a rank does not read counts as undeliverable.
        """
        self._deployment = deployment
        self._engine = engine
        self._send_timeout = int(send_timeout)
        self._streams = streams
        self.nonce = secrets.token_bytes(32)
        """A secret of this start."""
        self.local: dict[int, Child] = {}
        """The ranks of this host."""
        hosts = [deployment.machine.hosts[place.host].name for place in deployment.placements[engine]]
        self.remote = {rank: RemoteRank(hosts[rank]) for rank in streams}
        """The ranks of other hosts."""
        # The kernel removes an anonymous file with its last user, so nothing is left in /dev/shm after a crash.
        self._segment_fd = os.memfd_create("shardline")
        num_bytes = segment_layout(deployment, engine, deployment.placements[engine][0].host).num_bytes
        os.ftruncate(self._segment_fd, num_bytes)
        self.segment = memoryview(mmap.mmap(self._segment_fd, num_bytes))
        """Memory that the ranks of this host and this process map."""

    def start_rank(self, rank: int, step_address: str) -> tuple[Channel[WorkerReply], StartWorker]:
        """Start the process of a rank; returns its channel and the first message that it must get.

        The node of a rank on another host has started it already. It connects to `step_address` for its steps.
        """
        if rank in self.remote:
            ours = socket.socket(fileno=self._streams[rank])
        else:
            step_address = ""
            ours, theirs = socket.socketpair()
            with theirs:
                module = "shardline.runtime.worker_process"
                self.local[rank] = Child(module, [theirs.fileno(), self._segment_fd])
        # A worker reads at once, whatever it is doing. One that does not has stopped, and must not stop the engine.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", self._send_timeout, 0))
        channel: Channel[WorkerReply] = Channel(ours, WorkerReply)  # type: ignore[arg-type]
        return channel, StartWorker(self._deployment, self._engine, rank, self.nonce, step_address)

    def note_report(self, rank: int, report: RankStarted | RankBeat | RankEnded) -> None:
        """Keep what the node of a rank on another host has said of it."""
        remote = self.remote[rank]
        if isinstance(report, RankStarted):
            remote.host, remote.pid = report.host, report.pid
        elif isinstance(report, RankBeat):
            remote.activity = report.activity
        else:
            remote.end, remote.code, remote.host_lost = report.how, report.code, report.host_lost

    def find_silent(self) -> int | None:
        """A rank of this host that gives no sign of life; the nodes watch the others."""
        return next((rank for rank, child in self.local.items() if child.is_silent()), None)

    @property
    def work(self) -> int:
        """Pieces of work that all ranks have finished."""
        remote = sum(rank.activity.work for rank in self.remote.values())
        return remote + sum(child.work for child in self.local.values())

    def activities(self) -> list[Activity]:
        """What each rank has done so far, in a fixed order."""
        return [
            *(child.activity() for child in self.local.values()),
            *(rank.activity for rank in self.remote.values()),
        ]

    def name_rank(self, rank: int) -> str:
        """The rank's place in the grid, its host and its process id, with a comma at the end."""
        remote = self.remote.get(rank)
        host, pid = (remote.host, remote.pid) if remote else (socket.gethostname(), self.local[rank].pid)
        return f"{self._deployment.grid.place(rank)} on {host}, pid {pid},"

    def name_ranks(self, ranks: list[int]) -> str:
        """The names of several ranks."""
        return "; ".join(self.name_rank(rank).rstrip(",") for rank in ranks)

    def close(self) -> None:
        """Wait two seconds for the processes to end, since their channels are closed; kill those that do not.

        Those that give no sign of life are killed at once.
        """
        deadline = time.monotonic() + 2.0
        for child in self.local.values():
            if child.is_silent():
                child.kill()
        for child in self.local.values():
            child.end(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            os.close(self._segment_fd)
