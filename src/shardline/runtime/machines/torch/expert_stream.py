"""Experts that do not all stay on the device: those that tokens chose and that are not there are copied from host
memory, or from a file behind it."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardline.kernels.host.memory import streamed_empty
from shardline.kernels.torch.experts import ExpertKernels
from shardline.runtime.machines.expert_residency import ExpertResidency
from shardline.runtime.machines.host.expert_stream import ExpertStream
from shardline.runtime.machines.torch.host_memory import HostRows

_log = logging.getLogger(__name__)

_ALIGNMENT = 256


class _Layer(NamedTuple):
    row: int
    """In the tables of the residency."""
    sources: list[Tensor | HostRows]
    """Of each part of an expert, those of all experts in host memory."""
    held: list[list[Tensor | None]]
    """The same on the device; None: the expert is not there."""
    num_experts: int
    shapes: list[tuple[torch.dtype, torch.Size]]
    """Of each part."""


class DeviceExpertStream:
    """The experts of a rank. `kept_bytes` is what may be on the device of all of them together. Experts take the places
    of others as large as they, and of each size there is always room for all of a layer."""

    def __init__(self, kernels: ExpertKernels, kept_bytes: int, num_layers: int, files: ExpertStream | None) -> None:
        """`files`: what has them in host memory when they are copied; None: all of them lie there."""
        self._kernels = kernels
        self._kept_bytes = kept_bytes
        self._num_layers = num_layers
        self._files = files
        self._layers: dict[int, _Layer] = {}
        """By their index in the model, in the order of steps."""
        self._residency = ExpertResidency([], [], 0, "")
        """It has the layers once all are loaded. Every expert counts with the bytes of its place."""
        self._free: dict[int, list[Tensor]] = {}
        """Places where no expert is, by their bytes."""
        self._place_of: dict[tuple[int, int], Tensor] = {}
        """By row and expert."""

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Weights that are allocated meanwhile are those of the experts of the layer that `keep` is called for next."""
        yield

    def keep(self, layer: int, panels: Sequence[Tensor], other_bytes: int) -> None:
        """Move the loaded weights `panels`, each [experts, ...], of a layer to host memory. `other_bytes`: what else
        its experts have on the device, and keep there.

        Raises:
            ValueError: they cannot be written to a file.
        """
        sources: list[Tensor | HostRows] = []
        held: list[list[Tensor | None]] = [[None] * len(part) for part in panels]
        shapes = [(part.dtype, part[0].shape) for part in panels]
        if self._files is None:
            sources += [HostRows(part) for part in panels]
        else:
            with self._files.loading():
                in_memory = [streamed_empty(part.shape, part.dtype).copy_(part) for part in panels]
            self._files.keep(layer, in_memory, 0)
            sources += in_memory
        for part, experts in zip(panels, held, strict=True):
            self._kernels.copied_experts[part] = experts
            assert part._base is None, "a view holds the memory that is to be freed"
            nothing = torch.empty(1, dtype=part.dtype, device=part.device)
            part.set_(nothing.untyped_storage(), 0, part.shape, (0,) * part.dim())
        self._layers[layer] = _Layer(len(self._layers), sources, held, len(panels[0]), shapes)
        self._kept_bytes -= other_bytes
        if len(self._layers) == self._num_layers:
            self._begin()

    def _begin(self) -> None:
        layers = self._layers.values()
        sizes = [sum(_padded(dtype, shape) for dtype, shape in layer.shapes) for layer in layers]
        counts = [layer.num_experts for layer in layers]
        self._residency = ExpertResidency(counts, sizes, self._kept_bytes, "host memory")
        num_places = _count_places(counts, sizes, self._kept_bytes)
        for size, count in num_places.items():
            places = torch.empty(count, size, dtype=torch.uint8, device=self._kernels.device)
            self._free[size] = list(places)
        if self._files is not None:
            self._files.held_elsewhere = self._held
        _log.info(
            "experts of %d layers are copied to the device when tokens choose them: %d of %d stay there, the most "
            "wanted, and %s",
            len(counts),
            sum(num_places.values()),
            sum(counts),
            "all are in host memory" if self._files is None else "host memory has some of the others",
        )

    def acquire(self, layer: int, ids: Tensor, first: int) -> None:
        """Have those of the experts `ids` of a layer on the device that the rank holds, which are the ones from `first`
        on. Others may leave.

        Raises:
            OSError: they cannot be read, or are not what was written.
        """
        own, residency = self._layers[layer], self._residency
        experts = residency.choose(own.row, ids.cpu(), first)
        missing = experts[~residency.present[own.row, experts]]
        if not len(missing):
            return
        started = time.perf_counter()
        if self._files is not None:
            self._files.acquire(layer, torch.from_numpy(missing), 0)
        size = int(residency.sizes[own.row])
        staying = np.zeros_like(residency.present)
        staying[residency.sizes != size] = True
        staying[own.row, experts] = True
        layers, free = list(self._layers.values()), self._free[size]
        for row, expert in residency.leaving((len(missing) - len(free)) * size, own.row, staying):
            for held in layers[row].held:
                held[expert] = None
            free.append(self._place_of.pop((row, expert)))
        for expert in missing.tolist():
            self._copy(own, expert, free.pop())
        residency.come(own.row, missing)
        # Without this, the time of the copies would be that of whatever waits for them.
        torch.get_device_module(self._kernels.device).synchronize()
        residency.waited += time.perf_counter() - started

    def _copy(self, layer: _Layer, expert: int, place: Tensor) -> None:
        """Copy an expert to its place, after the kernels that were launched before."""
        self._place_of[layer.row, expert] = place
        for source, held, (dtype, shape) in zip(layer.sources, layer.held, layer.shapes, strict=True):
            held[expert] = part = place[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            place = place[_padded(dtype, shape) :]
            if isinstance(source, Tensor):
                part.copy_(source[expert], non_blocking=True)
                continue
            left = part.view(-1).view(torch.uint8)
            for piece in source.parts_of(expert):
                left[: len(piece)].copy_(piece, non_blocking=True)
                left = left[len(piece) :]

    def _held(self, layer: int) -> NDArray[np.bool_]:
        """[experts of the layer]: which of them are on the device."""
        own = self._layers[layer]
        return self._residency.present[own.row, : own.num_experts]


def _count_places(counts: Sequence[int], sizes: Sequence[int], kept_bytes: int) -> dict[int, int]:
    """How many experts of each size have a place, for layers of `counts` experts of `sizes` bytes: all of one layer,
    and of the others as many as the rest of `kept_bytes` allows, of each size the same share."""
    layers = list(zip(counts, sizes, strict=True))
    least = {size: max(count for count, own in layers if own == size) for size in sizes}
    more = {size: sum(count for count, own in layers if own == size) - least[size] for size in least}
    left = max(0, kept_bytes - sum(size * count for size, count in least.items()))
    wanted = max(1, sum(size * count for size, count in more.items()))
    return {size: least[size] + min(left, wanted) * more[size] // wanted for size in least}


def _padded(dtype: torch.dtype, shape: torch.Size) -> int:
    """Bytes of a part in a slot."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
