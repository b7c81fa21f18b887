"""Brings experts to this rank: reads them beside the steps, and puts them in place between two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from shardline.messages.experts import ExpertProgress, ReadExperts
from shardline.runtime.decoder import DecoderLayer
from shardline.runtime.layers.moe import ExpertWeights, MoEFeedForward


class ExpertMover:
    """The experts that a rank reads, one move at a time."""

    def __init__(self, layers: Sequence[DecoderLayer], first: int) -> None:
        """`first`: the number of the first of these layers in the model."""
        self._layers = layers
        self._first = first
        self._command = ReadExperts(0, ())
        self._thread: threading.Thread | None = None
        self._read: list[tuple[int, ExpertWeights]] = []
        self._error = ""

    def read(self, command: ReadExperts) -> None:
        """See `ReadExperts`. A read that goes on is waited for."""
        if self._thread is not None:
            self._thread.join()
        self._command, self._read, self._error, self._thread = command, [], "", None
        if self._block is not None:
            self._thread = threading.Thread(target=self._read_all, name="read-experts")
            self._thread.start()

    def progress(self) -> ExpertProgress:
        """See `LookAtExperts`."""
        return ExpertProgress(self._thread is None or not self._thread.is_alive(), self._error)

    def put(self) -> float:
        """See `PutExperts`."""
        started = time.perf_counter()
        if self._block is not None:
            self._block.put_experts(self._command.changes, self._read)
        self._read = []
        return time.perf_counter() - started

    @property
    def _block(self) -> MoEFeedForward | None:
        """The layer's experts, if this rank's stage has the layer."""
        index = self._command.layer - self._first
        if not 0 <= index < len(self._layers):
            return None
        block = self._layers[index].feed_forward
        assert isinstance(block, MoEFeedForward)
        return block

    def _read_all(self) -> None:
        assert self._block is not None
        try:
            with torch.inference_mode():
                self._read = self._block.read_experts(self._command.changes)
        except (OSError, ValueError) as error:
            self._error = str(error) or type(error).__name__
