"""The processes of an engine's ranks: their start, their names in messages, and their end."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from shardline.channel import Channel
from shardline.deployment.deployment import Deployment
from shardline.deployment.messages import StartWorker, WorkerReply
from shardline.deployment.segment import segment_layout
from shardline.engine.children import describe_end, start_child


class RankProcesses:
    """One process per rank, and what all of them share: a memory segment, and a store where they meet."""

    def __init__(self, deployment: Deployment, engine: int, send_timeout: float) -> None:
        """`send_timeout`: seconds after which a message that a rank does not read counts as undeliverable."""
        self._deployment = deployment
        self._engine = engine
        self._send_timeout = int(send_timeout)
        self._processes: list[subprocess.Popen[bytes]] = []
        # The kernel removes an anonymous file with its last user, so nothing is left in /dev/shm after a crash.
        self._segment_fd = os.memfd_create("shardline")
        num_bytes = segment_layout(deployment, engine, deployment.placements[engine][0].host).num_bytes
        os.ftruncate(self._segment_fd, num_bytes)
        self.segment = memoryview(mmap.mmap(self._segment_fd, num_bytes))
        """Memory that all ranks and this process map."""
        self._store_folder = tempfile.mkdtemp(prefix="shardline-") if deployment.collectives != "shm" else None

    def spawn_rank(self) -> Channel[WorkerReply]:
        """Start the process of the next rank."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_child("shardline.runtime.worker_process", [theirs.fileno(), self._segment_fd])
        rank = len(self._processes)
        self._processes.append(process)
        # A worker reads at once, whatever it is doing. One that does not has stopped, and must not stop the engine.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", self._send_timeout, 0))
        channel: Channel[WorkerReply] = Channel(ours, WorkerReply)  # type: ignore[arg-type]
        store = str(Path(self._store_folder) / "store") if self._store_folder else ""
        channel.send(StartWorker(self._deployment, self._engine, rank, store))
        return channel

    def name_rank(self, rank: int) -> str:
        """The rank's place in the grid, its host and its process id, with a comma at the end."""
        return f"{self._deployment.grid.place(rank)} on {socket.gethostname()}, pid {self._processes[rank].pid},"

    def name_ranks(self, ranks: list[int]) -> str:
        """The names of several ranks."""
        return "; ".join(self.name_rank(rank).rstrip(",") for rank in ranks)

    def describe_end(self, rank: int) -> str:
        """The rank's name, and how its process ended."""
        return f"{self.name_rank(rank)} {describe_end(self._processes[rank])}"

    def find_crashed(self, complaining: int) -> int | None:
        """A rank other than `complaining` whose process crashed; waits half a second for one. None: there is none."""
        deadline = time.monotonic() + 0.5
        others = [rank for rank in range(len(self._processes)) if rank != complaining]
        while time.monotonic() < deadline:
            for rank in others:
                if self._processes[rank].poll() not in (None, 0):
                    return rank
            time.sleep(0.01)
        return None

    def remove_store(self) -> None:
        """Remove the store; the ranks do not need it once they have met."""
        if self._store_folder is not None:
            shutil.rmtree(self._store_folder, ignore_errors=True)
            self._store_folder = None

    def close(self) -> None:
        """Wait two seconds for the processes to end, since their channels are closed; kill those that do not."""
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.remove_store()
        with contextlib.suppress(OSError):
            os.close(self._segment_fd)

    def kill(self) -> None:
        """Kill all processes at once; any thread may call this."""
        for process in self._processes:
            process.kill()
