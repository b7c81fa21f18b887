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

_log = logging.getLogger(__name__)

_READERS = 4
"""Threads that read in turn: while some check their chunks, or wait for a core, the others' reads are under way."""
_TOLD_STEPS = (16, 256)
"""Steps after which the log says what they have cost."""


class WeightStream:
    """The layers `layers` of a rank. Steps run them in this order, again and again."""

    def __init__(self, folder: Path, layers: Sequence[int], layer_bytes: int) -> None:
        """`layer_bytes`: the most that the weights of a layer have, without padding.

        Raises:
            ValueError: no file can be made in the folder.
        """
        self._file = WeightFile(folder, len(layers) * layer_bytes)
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._layers = list(layers)
        most = 2 * layer_bytes + (64 << 20)  # pages that are not touched take no memory
        self._regions = [Region(map_memory(most)) for _ in layers[:LAYER_SLOTS]]
        self._extents: list[Extent] = []
        """Where each layer lies in the file."""
        self._wanted: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        """(place in `layers`, number) of chunks whose memory is free for them; a place below zero ends a reader."""
        self._ready = [threading.Event() for _ in layers]
        self._lock = threading.Lock()
        self._unread = [0] * len(self._layers)
        """How many chunks of a layer are still to be read."""
        self._error: Exception | None = None
        self._waited = self._read_seconds = self._reads_began = 0.0
        self._num_steps = 0

    @contextlib.contextmanager
    def loading(self, layer: int) -> Iterator[None]:
        """Weights that are allocated meanwhile are those of a layer; afterwards they are in the file.

        Raises:
            ValueError: they cannot be written.
        """
        place = self._places.get(layer)
        if place is None:
            yield
            return
        region = self._regions[place % LAYER_SLOTS]
        region.used = 0
        with taking_from(region):
            yield
        self._extents.append(self._file.append(region.memory, 0, -(-region.used // BLOCK) * BLOCK, shorten=True))
        self._file.flush()
        if place == len(self._layers) - 1:
            self._begin()

    def acquire(self, layer: int) -> None:
        """Wait until the weights of a layer are in memory. Does nothing for a layer that stays there.

        Raises:
            OSError: they cannot be read, or are not what was written.
        """
        place = self._places.get(layer)
        if place is None:
            return
        if not self._ready[place].is_set():
            started = time.perf_counter()
            self._ready[place].wait()
            self._waited += time.perf_counter() - started
        if self._error is not None:
            raise self._error

    def release(self, layer: int) -> None:
        """The layer has computed: another one may take its memory."""
        place = self._places.get(layer)
        if place is None:
            return
        self._ready[place].clear()
        following = place + LAYER_SLOTS
        self._want(following if following < len(self._layers) else place % LAYER_SLOTS)
        if place == len(self._layers) - 1:
            self._num_steps += 1
            if self._num_steps in _TOLD_STEPS:
                rate = self._file.num_bytes * self._num_steps / 1e9 / max(1e-9, self._read_seconds)
                each = self._waited / self._num_steps
                _log.info(
                    "%d steps: each waited %.3f s for weights, which came at %.2f GB/s", self._num_steps, each, rate
                )

    def _begin(self) -> None:
        for _ in range(_READERS):
            weakref.finalize(self, self._wanted.put, (-1, 0))
            threading.Thread(target=_read_all, args=(weakref.ref(self), self._wanted), daemon=True).start()
        started = time.perf_counter()
        for place in range(len(self._regions)):
            self._want(place)
        for ready in self._ready[:LAYER_SLOTS]:
            ready.wait()
        read = sum(chunk.stored for extent in self._extents[:LAYER_SLOTS] for chunk in extent.chunks)
        rate = read / (time.perf_counter() - started)
        _log.info(
            "%d layers are read in every step, %s in all, from %s: at %.2f GB/s, as the first two came, a step takes "
            "%.2f s or more",
            len(self._layers),
            format_bytes(self._file.num_bytes),
            self._file.folder,
            rate / 1e9,
            self._file.num_bytes / rate,
        )

    def _want(self, place: int) -> None:
        count = len(self._extents[place].chunks)
        with self._lock:
            if not any(self._unread):
                self._reads_began = time.perf_counter()
            self._unread[place] = count
        for number in range(count):
            self._wanted.put((place, number))

    def read(self, place: int, number: int) -> None:
        """Read a chunk of a layer into its memory; what goes wrong is told to the next step."""
        try:
            self._file.read_chunk(self._extents[place], number, f"the weights of layer {self._layers[place]}")
        except OSError as error:
            self._error = error
        with self._lock:
            self._unread[place] -= 1
            is_read = not self._unread[place]
            if not any(self._unread):
                self._read_seconds += time.perf_counter() - self._reads_began
        if self._error is not None:
            for ready in self._ready:
                ready.set()
        elif is_read:
            self._ready[place].set()


def _read_all(stream_of: Callable[[], WeightStream | None], wanted: queue.SimpleQueue[tuple[int, int]]) -> None:
    """Read what is wanted until the stream is gone."""
    while (chunk := wanted.get())[0] >= 0:
        stream = stream_of()
        if stream is None:
            return
        stream.read(*chunk)
        del stream
