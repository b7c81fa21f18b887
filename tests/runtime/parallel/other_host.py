"""A process that plays another host: `python -m tests.runtime.parallel.other_host SOCKET_FD FOLDER`.

It shares no memory with the engine. It runs one rank after another, each as its first message says.
"""

from __future__ import annotations

import mmap
import socket
import sys
from pathlib import Path

from perf.nodes import FolderStore

from shardline.channel import Channel
from shardline.deployment.segment import segment_layout
from shardline.messages.worker import RankReady, RunStep, StartWorker, StepDone, WorkerRequest
from shardline.runtime.machines import open_backend
from shardline.runtime.parallel.groups import connect_host_memory
from shardline.runtime.parallel.rendezvous import Meeting
from shardline.runtime.worker import Worker


def start_worker(start: StartWorker, folder: Path) -> tuple[Worker, RankReady]:
    """A rank in this process, with the segment of its host. Ranks meet in `folder`, which all hosts see."""
    deployment, rank = start.deployment, start.rank
    place = deployment.placements[start.engine][rank]
    layout = segment_layout(deployment, start.engine, place.host)
    segment = memoryview(mmap.mmap(-1, layout.num_bytes))
    store = folder / start.nonce.hex()
    store.mkdir(exist_ok=True)
    meeting = Meeting(FolderStore(store), "127.0.0.1", start.nonce, 30.0)
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
            worker, ready = start_worker(message, Path(sys.argv[2]))
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
