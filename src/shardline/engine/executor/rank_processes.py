"""The processes of an engine's ranks, here and on other hosts: their start, their names in messages, and their end."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from shardline.channel import Channel
from shardline.deployment.deployment import Deployment
from shardline.deployment.segment import segment_layout
from shardline.engine.children import Child, is_own_end
from shardline.messages.worker import RankBeat, RankEnded, RankStarted, StartWorker, WorkerReply
from shardline.segment.activity import Activity

_NO_NEWS = "has lost its connection to the engine"


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
        self._local: dict[int, Child] = {}
        hosts = [deployment.machine.hosts[place.host].name for place in deployment.placements[engine]]
        self._remote = {rank: RemoteRank(hosts[rank]) for rank in streams}
        self.has_remote = bool(streams)
        """Whether ranks run on other hosts."""
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
        if rank in self._remote:
            ours = socket.socket(fileno=self._streams[rank])
        else:
            step_address = ""
            ours, theirs = socket.socketpair()
            with theirs:
                module = "shardline.runtime.worker_process"
                self._local[rank] = Child(module, [theirs.fileno(), self._segment_fd])
        # A worker reads at once, whatever it is doing. One that does not has stopped, and must not stop the engine.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", self._send_timeout, 0))
        channel: Channel[WorkerReply] = Channel(ours, WorkerReply)  # type: ignore[arg-type]
        return channel, StartWorker(self._deployment, self._engine, rank, self.nonce, step_address)

    def note_report(self, rank: int, report: RankStarted | RankBeat | RankEnded) -> None:
        """Keep what the node of a rank on another host has said of it."""
        remote = self._remote[rank]
        if isinstance(report, RankStarted):
            remote.host, remote.pid = report.host, report.pid
        elif isinstance(report, RankBeat):
            remote.activity = report.activity
        else:
            remote.end, remote.code, remote.host_lost = report.how, report.code, report.host_lost

    def find_silent(self) -> int | None:
        """A rank of this host that gives no sign of life; the nodes watch the others."""
        return next((rank for rank, child in self._local.items() if child.is_silent()), None)

    @property
    def work(self) -> int:
        """Pieces of work that all ranks have finished."""
        remote = sum(rank.activity.work for rank in self._remote.values())
        return remote + sum(child.work for child in self._local.values())

    def activities(self) -> list[Activity]:
        """What each rank has done so far, in a fixed order."""
        return [
            *(child.activity() for child in self._local.values()),
            *(rank.activity for rank in self._remote.values()),
        ]

    def name_rank(self, rank: int) -> str:
        """The rank's place in the grid, its host and its process id, with a comma at the end."""
        remote = self._remote.get(rank)
        host, pid = (remote.host, remote.pid) if remote else (socket.gethostname(), self._local[rank].pid)
        return f"{self._deployment.grid.place(rank)} on {host}, pid {pid},"

    def name_ranks(self, ranks: list[int]) -> str:
        """The names of several ranks."""
        return "; ".join(self.name_rank(rank).rstrip(",") for rank in ranks)

    def describe_ends(self, ranks: Sequence[int]) -> str:
        """How the processes of some ranks ended. Ranks that ended in the same way share the words."""
        by_words: dict[str, list[int]] = {}
        for rank in ranks:
            remote = self._remote.get(rank)
            how = (remote.end or _NO_NEWS) if remote else self._local[rank].describe_end()
            by_words.setdefault(how, []).append(rank)
        return "; ".join(
            f"{self.name_rank(same[0])} {how}" if len(same) == 1 else f"{self.name_ranks(same)}: each {how}"
            for how, same in by_words.items()
        )

    def was_killed(self, rank: int) -> bool:
        """Whether the rank ended or stopped by something outside it: a signal, or the loss of its host.

        An abort is no such signal: libraries abort a process when another rank has gone.
        """
        if (remote := self._remote.get(rank)) is not None:
            return bool(remote.end) and (remote.code is None or _is_kill(remote.code))
        child = self._local[rank]
        code = child.poll()
        return child.is_silent() if code is None else _is_kill(code)

    def were_cut_off(self, ranks: Sequence[int]) -> bool:
        """Whether the host of one of these ranks is lost, or the connection to it."""
        remotes = [self._remote[rank] for rank in ranks if rank in self._remote]
        return any(remote.host_lost or not remote.end for remote in remotes)

    def has_crashed(self, rank: int) -> bool:
        """Whether the process has ended with an error, or it cannot be known."""
        remote = self._remote.get(rank)
        return remote.code != 0 if remote is not None else self._local[rank].poll() not in (None, 0)

    def crashed_by_itself(self, rank: int) -> bool:
        """Whether the process has ended, and nothing from outside has ended it."""
        remote = self._remote.get(rank)
        return is_own_end(remote.code if remote is not None else self._local[rank].poll())

    def close(self) -> None:
        """Wait two seconds for the processes to end, since their channels are closed; kill those that do not.

        Those that give no sign of life are killed at once.
        """
        deadline = time.monotonic() + 2.0
        for child in self._local.values():
            if child.is_silent():
                child.kill()
        for child in self._local.values():
            child.end(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            os.close(self._segment_fd)


def _is_kill(code: int) -> bool:
    return code < 0 and code != -signal.SIGABRT
