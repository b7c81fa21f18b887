"""A process that plays another host: `python -m tests.parallel.other_host SOCKET_FD FOLDER`.

It shares no memory with the engine. It runs one rank after another, each as its first message says.
"""

from __future__ import annotations

import mmap
import socket
import sys
import time
from pathlib import Path

from shardline.channel import Channel
from shardline.deployment.messages import RankReady, RunStep, StartWorker, StepDone, WorkerRequest
from shardline.deployment.segment import segment_layout
from shardline.runtime.backends import open_backend
from shardline.runtime.parallel.groups import connect_host_memory
from shardline.runtime.parallel.rendezvous import Meeting
from shardline.runtime.worker import Worker

NONCE = b"a nonce for tests only"


class FolderStore:
    """A store for processes that see one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        path = self._folder / key.replace("/", "-")
        path.with_suffix(".new").write_bytes(value)
        path.with_suffix(".new").rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        path, deadline = self._folder / key.replace("/", "-"), time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody has set {key}")
            time.sleep(0.005)
        return path.read_bytes()


def start_worker(start: StartWorker) -> tuple[Worker, RankReady]:
    """A rank in this process, with the segment of its host."""
    deployment, rank = start.deployment, start.rank
    place = deployment.placements[start.engine][rank]
    layout = segment_layout(deployment, start.engine, place.host)
    segment = memoryview(mmap.mmap(-1, layout.num_bytes))
    meeting = Meeting(FolderStore(Path(start.store_path)), "127.0.0.1", NONCE, 30.0)
    backend = open_backend(deployment.device, rank, place.threads)
    groups = connect_host_memory(backend.kernels, segment, layout, rank, 30.0, meeting)
    worker = Worker(deployment, backend, groups)
    return worker, RankReady(worker.load())


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), WorkerRequest)  # type: ignore[arg-type, var-annotated]
    worker: Worker | None = None
    is_driver = False
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return
        if isinstance(message, StartWorker):
            worker, ready = start_worker(message)
            is_driver = message.rank in message.deployment.grid.drivers
            channel.send(ready)
        else:
            assert isinstance(message, RunStep)
            assert worker is not None
            result = worker.runner.run_step(message.step)
            if result is not None and is_driver:
                channel.send(StepDone(result))


if __name__ == "__main__":
    main()
