"""Experts that do not all stay in memory: those that tokens chose and that are not there are read from a file.

The weights of a layer's experts keep their place in the address space, so kernels need not know. The pages of an expert
that leaves move to the place of one that comes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardline.kernels.host.memory import Region, taking_from
from shardline.kernels.memory import map_memory
from shardline.runtime.machines.expert_residency import ExpertResidency
from shardline.runtime.machines.host.pages import can_move, move_pages
from shardline.runtime.machines.host.weight_file import BLOCK, Extent, WeightFile

_log = logging.getLogger(__name__)

_READERS = 3
"""Threads that read: while one checks its chunk, others read the next."""
_MOST_CHOSEN = 0.5
"""Share of a layer's experts. If tokens chose more of them, they will choose as many of the next layer, which is then
read while this one computes."""


class _Pages(NamedTuple):
    memory: mmap.mmap
    start: int
    length: int

    @property
    def address(self) -> int:
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=1, offset=self.start).data_ptr()

    def drop(self) -> None:
        """Give them back to the system."""
        self.memory.madvise(mmap.MADV_DONTNEED, self.start, self.length)

    def split(self, length: int) -> tuple[_Pages, _Pages]:
        """The first `length` bytes, and the others."""
        return self._replace(length=length), _Pages(self.memory, self.start + length, self.length - length)


class _Layer(NamedTuple):
    row: int
    """In the tables of the stream."""
    extents: list[list[Extent]]
    """Of each expert, where its weights lie."""
    pages: list[list[_Pages]]
    """Of each expert, those that are its own alone."""


class ExpertStream:
    """The experts of a rank. `kept_bytes` is what may be in memory of all of them together."""

    def __init__(self, folder: Path, kept_bytes: int, layer_bytes: int, num_layers: int) -> None:
        """`layer_bytes`: the most that the experts of a layer have, without padding.

        Raises:
            ValueError: no file can be made in the folder.
        """
        self._file = WeightFile(folder, num_layers * layer_bytes)
        self._room = kept_bytes
        self._layer_bytes = layer_bytes
        self._num_layers = num_layers
        self._layers: dict[int, _Layer] = {}
        """By their index in the model, in the order of steps."""
        self._pool = ThreadPoolExecutor(_READERS, "experts")
        self._coming: dict[tuple[int, int], list[Future[None]]] = {}
        """The reads of experts that count as present already, by row and expert."""
        self._sizes: list[int] = []
        """Bytes of an expert of each layer."""
        self._residency = ExpertResidency([], [], 0, "")
        """It has the layers once all are loaded."""
        self._spare: list[_Pages] = []
        """Pages of experts that left, for those that come."""
        self._num_mappings = 0
        self._pages_move = False
        self._byte_seconds = 0.0
        """What reading a byte took last."""
        self._ready_at = math.inf
        """When the last layer had its experts."""
        self._computing: NDArray[np.float64] = np.zeros(0)
        """[layers]: seconds of the last step between the layer before and this one."""
        self.held_elsewhere: Callable[[int], NDArray[np.bool_]] | None = None
        """Which experts of a layer compute in other memory, so that they need not be read ahead."""

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Weights that are allocated meanwhile are those of the experts of the layer that `keep` is called for next."""
        # Pages that are not touched take no memory.
        self._region = Region(map_memory(2 * self._layer_bytes + (64 << 20)))
        # A huge page that spans two experts could not be given back with one of them.
        with contextlib.suppress(OSError, AttributeError):
            self._region.memory.madvise(mmap.MADV_NOHUGEPAGE)
        with taking_from(self._region):
            yield

    def keep(self, layer: int, panels: Sequence[Tensor], other_bytes: int) -> None:
        """Write the loaded weights `panels`, each [experts, ...], of a layer. `other_bytes`: what else its experts have
        in memory, and keep there.

        Raises:
            ValueError: they cannot be written.
        """
        region = self._region
        base = torch.frombuffer(region.memory, dtype=torch.uint8, count=1).data_ptr()
        extents, pages = [], []
        for expert in range(len(panels[0])):
            spans = [_span(part[expert], base) for part in panels]
            assert all(start >= 0 and stop <= len(region.memory) for start, stop in spans)
            extents.append([self._write(region, start, stop) for start, stop in spans])
            own = [(-(-start // BLOCK) * BLOCK, stop // BLOCK * BLOCK) for start, stop in spans]
            pages.append([_Pages(region.memory, start, stop - start) for start, stop in own if start < stop])
            # A place whose pages have moved is a mapping of its own, and so is what lies between it and the next one.
            self._num_mappings += 2 * len(spans) - sum(whole == span for whole, span in zip(own, spans, strict=True))
        self._file.flush()
        for part in itertools.chain(*pages):
            part.drop()
        row = len(self._layers)
        self._layers[layer] = _Layer(row, extents, pages)
        self._sizes.append(sum(part[0].nbytes for part in panels))
        self._room -= other_bytes
        if row + 1 == self._num_layers:
            self._begin()

    def _write(self, region: Region, start: int, stop: int) -> Extent:
        start, stop = start // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK
        return self._file.append(region.memory, start, stop - start)

    def _begin(self) -> None:
        counts = [len(layer.extents) for layer in self._layers.values()]
        self._residency = ExpertResidency(counts, self._sizes, self._room, str(self._file.folder))
        self._computing = np.zeros(len(counts))
        self._pages_move = can_move(self._num_mappings)
        _log.info(
            "experts of %d layers are read from %s when tokens choose them: %s stay in memory, the most wanted",
            len(counts),
            self._file.folder,
            self._residency.extent,
        )

    def acquire(self, layer: int, ids: Tensor, first: int) -> None:
        """Have those of the experts `ids` of a layer in memory that the rank holds, which are the ones from `first` on.
        Others may leave.

        Raises:
            OSError: they cannot be read, or are not what was written.
        """
        own, residency = self._layers[layer], self._residency
        experts = residency.choose(own.row, ids, first)
        started = time.perf_counter()
        self._computing[own.row] = max(0.0, started - self._ready_at)
        # All reads for this layer end before it computes: where they end, pages hold parts of two experts.
        for row, expert in [key for key in self._coming if key[0] == own.row]:
            self._await(row, expert)
        missing = experts[~residency.present[own.row, experts]]
        if len(missing):
            staying = np.zeros_like(residency.present)
            staying[own.row, experts] = True
            self._start_reading(layer, missing, own.row, staying)
            begun = time.perf_counter()
            for expert in missing.tolist():
                self._await(own.row, expert)
            self._byte_seconds = (time.perf_counter() - begun) / (len(missing) * self._sizes[own.row])
        self._ready_at = time.perf_counter()
        residency.waited += self._ready_at - started
        if len(experts) > _MOST_CHOSEN * len(own.extents):
            self._read_ahead(own.row)

    def _await(self, row: int, expert: int) -> None:
        problems = [future.exception() for future in self._coming.pop((row, expert), ())]
        for problem in filter(None, problems):
            self._residency.present[row, expert] = False  # whoever goes on after the error reads it again
            raise problem

    def _read_ahead(self, row: int) -> None:
        """Read of the next layer what can be read while this one computes, and there is room for. What is read too
        early takes the room of experts that are needed before."""
        residency, following = self._residency, (row + 1) % len(self._layers)
        layer, present, size = list(self._layers)[following], residency.present, self._sizes[following]
        absent = ~present[following, : residency.counts[following]]
        if self.held_elsewhere is not None:
            absent &= ~self.held_elsewhere(layer)
        missing = np.flatnonzero(absent)
        held = present[[row, following]].sum(1) @ residency.sizes[[row, following]]
        in_time = self._computing[following] / (self._byte_seconds * size) if self._byte_seconds else len(missing)
        missing = missing[: min(max(0, residency.room - int(held)) // size, 1 + int(in_time))]
        if following != row and len(missing):
            staying = np.zeros_like(present)
            staying[[row, following]] = True
            self._start_reading(layer, missing, row, staying)

    def _start_reading(self, layer: int, experts: NDArray[np.int64], current: int, staying: NDArray[np.bool_]) -> None:
        """Read experts of a layer in place of others; `current` and `staying`: see `ExpertResidency.leaving`."""
        own, what, layers = self._layers[layer], f"the experts of layer {layer}", list(self._layers.values())
        self._drop_spare()  # of a call that ended in an error
        lacking = self._residency.lacking(len(experts) * self._sizes[own.row])
        for row, expert in self._residency.leaving(lacking, current, staying):
            self._await(row, expert)
            self._spare += layers[row].pages[expert]
        for expert in experts.tolist():
            for pages in own.pages[expert]:
                self._bring_pages(pages)
            reads = [self._pool.submit(self._file.read, extent, what) for extent in own.extents[expert]]
            self._coming[own.row, expert] = reads
        self._drop_spare()
        self._residency.come(own.row, experts)

    def _drop_spare(self) -> None:
        while self._spare:
            self._spare.pop().drop()

    def _bring_pages(self, place: _Pages) -> None:
        """Move spare pages to a place, as many as there are. It gets the others when they are written."""
        while self._spare and place.length:
            spare = self._spare.pop()
            source, rest = spare.split(min(spare.length, place.length))
            target, place = place.split(source.length)
            if rest.length:
                self._spare.append(rest)
            if not (self._pages_move and move_pages(source.address, target.address, source.length)):
                source.drop()


def _span(part: Tensor, base: int) -> tuple[int, int]:
    """Where a tensor begins and ends in the memory at `base`."""
    assert part.is_contiguous()
    start = part.data_ptr() - base
    return start, start + part.nbytes
