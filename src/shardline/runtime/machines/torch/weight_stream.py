"""Layers in three places: some stay on the device, and the weights of others lie in host memory or in a file behind it.
Every step copies these to one of a few places on the device, while the layer before them computes."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.config.fields import format_bytes
from shardline.deployment.deployment import LAYER_SLOTS
from shardline.kernels.host.memory import streamed_empty
from shardline.kernels.torch.linear import DenseKernels
from shardline.runtime.machines.host.weight_stream import WeightStream
from shardline.runtime.machines.layer_turns import LayerTurns
from shardline.runtime.machines.torch.host_memory import HostRows

_log = logging.getLogger(__name__)

_ALIGNMENT = 256


class _Layer(NamedTuple):
    number: int
    """In the model."""
    weights: list[tuple[Tensor, int]]
    """Each with its first byte in the layer's place on the device."""
    parts: Iterable[Tensor]
    """The bytes of all of them in host memory, in order."""
    num_bytes: int
    in_file: bool
    """Whether these have to be read before."""


class DeviceWeightStream(LayerTurns):
    """The layers of a rank that do not stay on its device."""

    def __init__(self, kernels: DenseKernels, layers: Sequence[int], files: WeightStream | None, in_files: set[int]):
        """`files` has the layers `in_files`; the others of `layers` lie in host memory."""
        super().__init__(layers)
        self._kernels = kernels
        self._device = kernels.device
        self._module: Any = torch.get_device_module(self._device)
        self._stream = self._module.Stream(self._device)
        self._files, self._in_files = files, in_files
        self._loaded: list[_Layer] = []
        self._slots = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in layers[:LAYER_SLOTS]]
        self._wanted: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        """(place in `layers`, event after which its slot is free); a place below zero ends the thread."""
        self._copying = 0.0
        """Seconds."""
        self._num_copied = 0
        """Bytes."""

    @contextlib.contextmanager
    def loading(self, layer: int) -> Iterator[None]:
        """Weights that are allocated meanwhile are those of a layer; afterwards they lie outside the device.

        Raises:
            ValueError: they cannot be written to a file.
        """
        if self.turn_of(layer) is None:
            yield
            return
        weights: list[Tensor] = []
        self._kernels.copied = weights
        try:
            yield
        finally:
            self._kernels.copied = None
        self._keep(layer, weights)
        if len(self._loaded) == len(self.layers):
            self._begin()

    def _keep(self, layer: int, weights: Sequence[Tensor]) -> None:
        starts, num_bytes = [], 0
        for weight in weights:
            starts.append(num_bytes)
            num_bytes += -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
        number = len(self._loaded) % LAYER_SLOTS
        if len(self._slots[number]) < num_bytes:
            self._slots[number] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            for earlier in self._loaded[number::LAYER_SLOTS]:
                self._place(earlier.weights, number)
        placed, slot = list(zip(weights, starts, strict=True)), self._slots[number][:num_bytes]
        for weight, start in placed:
            slot[start : start + weight.nbytes].copy_(weight.reshape(-1).view(torch.uint8))
        self._place(placed, number)
        parts: Iterable[Tensor]
        if in_file := layer in self._in_files:
            assert self._files is not None
            with self._files.loading(layer):
                parts = [streamed_empty((num_bytes,), torch.uint8).copy_(slot)]
        else:
            parts = HostRows(slot).pieces
        self._loaded.append(_Layer(layer, placed, parts, num_bytes, in_file))

    def _place(self, weights: Sequence[tuple[Tensor, int]], number: int) -> None:
        """Have the weights of a layer lie in a slot from now on."""
        memory = self._slots[number].untyped_storage()
        for weight, start in weights:
            assert weight.is_contiguous()
            assert weight._base is None, "a view holds the memory that is to be freed"
            weight.set_(memory, start // weight.itemsize, weight.shape, weight.stride())

    def rate(self) -> float:
        """See `LayerTurns.rate`."""
        return self._num_copied / max(1e-9, self._copying)

    def want(self, turn: int) -> None:
        """See `LayerTurns.want`."""
        launched = self._module.Event()
        launched.record(self._module.current_stream(self._device))
        self._wanted.put((turn, launched))

    def _begin(self) -> None:
        weakref.finalize(self, self._wanted.put, (-1, None))
        threading.Thread(target=_copy_all, args=(weakref.ref(self), self._wanted), daemon=True).start()
        self.begin()
        num_bytes, rate = sum(layer.num_bytes for layer in self._loaded), self.rate()
        _log.info(
            "%d layers are copied to the device in every step, %s in all, %d of them from files: at %.2f GB/s, as the "
            "first two came, a step takes %.2f s or more",
            len(self._loaded),
            format_bytes(num_bytes),
            len(self._in_files),
            rate / 1e9,
            num_bytes / rate,
        )

    def copy(self, turn: int, launched: Any) -> None:
        """Copy a layer to its slot once what was launched is over; what goes wrong is told to the next step."""
        layer = self._loaded[turn]
        try:
            launched.synchronize()
            started = time.perf_counter()
            if layer.in_file:
                assert self._files is not None
                self._files.acquire(layer.number)
            begin, copied = 0, self._module.Event()
            with torch.inference_mode(), self._module.stream(self._stream):
                for part in layer.parts:
                    self._slots[turn % LAYER_SLOTS][begin : begin + len(part)].copy_(part, non_blocking=True)
                    begin += len(part)
                copied.record(self._stream)
            copied.synchronize()
            if layer.in_file:
                assert self._files is not None
                self._files.release(layer.number)
            self._copying += time.perf_counter() - started
            self._num_copied += layer.num_bytes
        except Exception as error:
            self.arrive(turn, error)
        else:
            self.arrive(turn)


def _copy_all(stream_of: Callable[[], DeviceWeightStream | None], wanted: queue.SimpleQueue[tuple[int, Any]]) -> None:
    """Copy what is wanted until the stream is gone."""
    while (copy := wanted.get())[0] >= 0:
        stream = stream_of()
        if stream is None:
            return
        stream.copy(*copy)
        del stream
