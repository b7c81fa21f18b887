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
    """The experts of a rank. `kept_bytes` is what may be on the device of all of them together. Every one takes as
    much as the largest, and there is always room for all of a layer, so of unlike layers there may be more."""

    def __init__(self, kernels: ExpertKernels, kept_bytes: int, num_layers: int, files: ExpertStream | None) -> None:
        """`files`: what has them in host memory when they are copied; None: all of them lie there."""
        self._kernels = kernels
        self._kept_bytes = kept_bytes
        self._num_layers = num_layers
        self._files = files
        self._layers: dict[int, _Layer] = {}
        """By their index in the model, in the order of steps."""
        self._residency = ExpertResidency([], [], 0, "")
        """It has the layers once all are loaded. Every expert counts with the bytes of a slot."""
        self._slots = torch.empty(0)
        """[num_slots, bytes of an expert] uint8"""
        self._free: list[int] = []
        self._slot_of: dict[tuple[int, int], int] = {}
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
        self._residency = ExpertResidency(counts, [max(sizes)] * len(counts), self._kept_bytes, "host memory")
        num_slots = min(self._residency.room // max(sizes), sum(counts))
        self._slots = torch.empty(num_slots, max(sizes), dtype=torch.uint8, device=self._kernels.device)
        self._free = list(range(num_slots))
        _log.info(
            "experts of %d layers are copied to the device when tokens choose them: %d of %d stay there, the most "
            "wanted, and %s",
            len(counts),
            num_slots,
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
        staying = np.zeros_like(residency.present)
        staying[own.row, experts] = True
        layers = list(self._layers.values())
        for row, expert in residency.leaving(len(missing) * self._slots.shape[1], own.row, staying):
            for held in layers[row].held:
                held[expert] = None
            self._free.append(self._slot_of.pop((row, expert)))
        for expert in missing.tolist():
            self._copy(own, expert)
        residency.come(own.row, missing)
        # Without this, the time of the copies would be that of whatever waits for them.
        torch.get_device_module(self._kernels.device).synchronize()
        residency.waited += time.perf_counter() - started

    def _copy(self, layer: _Layer, expert: int) -> None:
        """Copy an expert to a free slot, after the kernels that were launched before."""
        slot = self._slot_of[layer.row, expert] = self._free.pop()
        begin = 0
        for source, held, (dtype, shape) in zip(layer.sources, layer.held, layer.shapes, strict=True):
            part = self._slots[slot, begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            held[expert] = part.copy_(source[expert], non_blocking=True)
            begin += _padded(dtype, shape)


def _padded(dtype: torch.dtype, shape: torch.Size) -> int:
    """Bytes of a part in a slot."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
