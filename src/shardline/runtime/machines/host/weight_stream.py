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

_READERS = 2
"""Threads that read in turn: while one checks its chunk, the other one reads the next."""
_TOLD_STEPS = (16, 256)
"""Steps after which the log says what they have cost."""


class WeightStream:
    """The layers `layers` of a rank. Steps run them in this order, again and again."""

    def __init__(self, folder: Path, layers: Sequence[int], layer_bytes: int) -> None:
        """`layer_bytes`: the most that the weights of a layer have, without padding.

        Raises:
            ValueError: no file can be made in the folder.
        """
        self._file = WeightFile(folder)
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._layers = list(layers)
        most = 2 * layer_bytes + (64 << 20)  # pages that are not touched take no memory
        self._regions = [Region(map_memory(most)) for _ in range(LAYER_SLOTS)]
        self._extents: list[Extent] = []
        """Where each layer lies in the file."""
        self._wanted: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(_READERS)]
        """For each reader, the places in `layers` whose memory is free for them."""
        self._ready = [threading.Event() for _ in layers]
        self._lock = threading.Lock()
        self._unread = [_READERS] * len(self._layers)
        """How many readers have still to read their chunks of a layer."""
        self._error: Exception | None = None
        self._waited = self._read_seconds = 0.0
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
        self._extents.append(self._file.append(region.memory, 0, -(-region.used // BLOCK) * BLOCK))
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
        for reader, wanted in enumerate(self._wanted):
            reading = threading.Thread(target=_read_all, args=(weakref.ref(self), reader, wanted), daemon=True)
            weakref.finalize(self, wanted.put, -1)
            reading.start()
        started = time.perf_counter()
        for place in range(LAYER_SLOTS):
            self._want(place)
        for place in range(LAYER_SLOTS):
            self._ready[place].wait()
        rate = sum(extent.length for extent in self._extents[:LAYER_SLOTS]) / (time.perf_counter() - started)
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
        self._unread[place] = _READERS
        for wanted in self._wanted:
            wanted.put(place)

    def read(self, place: int, reader: int) -> None:
        """Read a reader's chunks of a layer into its memory; what goes wrong is told to the next step."""
        started = time.perf_counter()
        try:
            self._file.read(self._extents[place], f"the weights of layer {self._layers[place]}", reader, _READERS)
        except OSError as error:
            self._error = error
        with self._lock:
            self._read_seconds += (time.perf_counter() - started) / _READERS
            self._unread[place] -= 1
            is_read = not self._unread[place]
        if self._error is not None:
            for ready in self._ready:
                ready.set()
        elif is_read:
            self._ready[place].set()


def _read_all(stream_of: Callable[[], WeightStream | None], reader: int, wanted: queue.SimpleQueue[int]) -> None:
    """Read what is wanted until the stream is gone."""
    while (place := wanted.get()) >= 0:
        stream = stream_of()
        if stream is None:
            return
        stream.read(place, reader)
        del stream
