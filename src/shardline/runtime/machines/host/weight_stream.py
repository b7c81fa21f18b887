"""Weights that are read from a file in every step: each layer into one of a few places in memory, while the layer
before it computes."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardline.config.fields import format_bytes
from shardline.deployment.deployment import LAYER_SLOTS
from shardline.kernels.host.memory import Region, taking_from
from shardline.kernels.memory import map_memory
from shardline.runtime.machines.host.weight_file import BLOCK, Extent, WeightFile
from shardline.runtime.machines.layer_turns import LayerTurns

_log = logging.getLogger(__name__)

_READERS = 4
"""Threads that read in turn: while some check their chunks, or wait for a core, the others' reads are under way."""


class WeightStream(LayerTurns):
    """The layers `layers` of a rank. Steps run them in this order, again and again."""

    def __init__(self, folder: Path, layers: Sequence[int], layer_bytes: int) -> None:
        """`layer_bytes`: the most that the weights of a layer have, without padding.

        Raises:
            ValueError: no file can be made in the folder.
        """
        super().__init__(layers)
        self._file = WeightFile(folder, len(layers) * layer_bytes)
        most = 2 * layer_bytes + (64 << 20)  # pages that are not touched take no memory
        self._regions = [Region(map_memory(most)) for _ in layers[:LAYER_SLOTS]]
        self._extents: list[Extent] = []
        """Where each layer lies in the file."""
        self._wanted: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        """(place in `layers`, number) of chunks whose memory is free for them; a place below zero ends a reader."""
        self._lock = threading.Lock()
        self._unread = [0] * len(layers)
        """How many chunks of a layer are still to be read."""
        self._read_seconds = self._reads_began = 0.0
        self._num_read = 0
        """Bytes of the file."""

    @contextlib.contextmanager
    def loading(self, layer: int) -> Iterator[None]:
        """Weights that are allocated meanwhile are those of a layer; afterwards they are in the file.

        Raises:
            ValueError: they cannot be written.
        """
        place = self.turn_of(layer)
        if place is None:
            yield
            return
        region = self._regions[place % LAYER_SLOTS]
        region.used = 0
        with taking_from(region):
            yield
        self._extents.append(self._file.append(region.memory, 0, -(-region.used // BLOCK) * BLOCK, shorten=True))
        self._file.flush()
        if place == len(self.layers) - 1:
            self._begin()

    def rate(self) -> float:
        """See `LayerTurns.rate`: the file's bytes, which may be fewer than in memory."""
        return self._num_read / max(1e-9, self._read_seconds)

    def _begin(self) -> None:
        for _ in range(_READERS):
            weakref.finalize(self, self._wanted.put, (-1, 0))
            threading.Thread(target=_read_all, args=(weakref.ref(self), self._wanted), daemon=True).start()
        self.begin()
        rate = self.rate()
        _log.info(
            "%d layers are read in every step, %s in all, from %s: at %.2f GB/s, as the first two came, a step takes "
            "%.2f s or more",
            len(self.layers),
            format_bytes(self._file.num_bytes),
            self._file.folder,
            rate / 1e9,
            self._file.num_bytes / rate,
        )

    def want(self, turn: int) -> None:
        """See `LayerTurns.want`."""
        count = len(self._extents[turn].chunks)
        with self._lock:
            if not any(self._unread):
                self._reads_began = time.perf_counter()
            self._unread[turn] = count
        for number in range(count):
            self._wanted.put((turn, number))

    def read(self, turn: int, number: int) -> None:
        """Read a chunk of a layer into its memory; what goes wrong is told to the next step."""
        extent = self._extents[turn]
        problem: Exception | None = None
        try:
            self._file.read_chunk(extent, number, f"the weights of layer {self.layers[turn]}")
        except Exception as error:
            problem = error
        with self._lock:
            self._num_read += extent.chunks[number].stored
            self._unread[turn] -= 1
            is_read = not self._unread[turn]
            if not any(self._unread):
                self._read_seconds += time.perf_counter() - self._reads_began
        if is_read or problem is not None:
            self.arrive(turn, problem)


def _read_all(stream_of: Callable[[], WeightStream | None], wanted: queue.SimpleQueue[tuple[int, int]]) -> None:
    """Read what is wanted until the stream is gone."""
    while (chunk := wanted.get())[0] >= 0:
        stream = stream_of()
        if stream is None:
            return
        stream.read(*chunk)
        del stream
