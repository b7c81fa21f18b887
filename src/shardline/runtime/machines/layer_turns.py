"""Layers that take turns in a few places in memory, which do not hold all of them."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from shardline.deployment.deployment import LAYER_SLOTS

_log = logging.getLogger(__name__)

_TOLD_STEPS = (16, 256)
"""Steps after which the log says what they have cost."""


class LayerTurns(ABC):
    """The layers `layers` of a rank. Steps run them in this order, again and again; every LAYER_SLOTS-th one has the
    same place."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = list(layers)
        self._turns = {layer: turn for turn, layer in enumerate(layers)}
        self._ready = [threading.Event() for _ in layers]
        self._error: Exception | None = None
        self._next = 0
        """The turn that comes, or has come and is not over."""
        self._waited = 0.0
        self._num_steps = 0

    def turn_of(self, layer: int) -> int | None:
        """The place of a layer in `layers`; None: it stays in memory."""
        return self._turns.get(layer)

    def acquire(self, layer: int) -> None:
        """Wait until the weights of a layer are in memory. Does nothing for a layer that stays there.

        Raises:
            OSError: they cannot be read, or are not what was written.
        """
        turn = self._turns.get(layer)
        if turn is None:
            return
        while self._next != turn:  # a step was cut short: its other layers have their turns now
            self._await(self._next)
            self._end_turn(self._next)
        self._await(turn)

    def _await(self, turn: int) -> None:
        if not self._ready[turn].is_set():
            started = time.perf_counter()
            self._ready[turn].wait()
            self._waited += time.perf_counter() - started
        if self._error is not None:
            raise self._error

    def release(self, layer: int) -> None:
        """The layer has computed, or its kernels have been launched: another one may have its place after them."""
        turn = self._turns.get(layer)
        if turn is not None:
            self._end_turn(turn)

    def _end_turn(self, turn: int) -> None:
        self._next = (turn + 1) % len(self.layers)
        self._ready[turn].clear()
        following = turn + LAYER_SLOTS
        self.want(following if following < len(self.layers) else turn % LAYER_SLOTS)
        if turn == len(self.layers) - 1:
            self._num_steps += 1
            if self._num_steps in _TOLD_STEPS:
                each = self._waited / self._num_steps
                _log.info(
                    "%d steps: each waited %.3f s for weights, which came at %.2f GB/s",
                    self._num_steps,
                    each,
                    self.rate() / 1e9,
                )

    def begin(self) -> None:
        """Bring the first layers, and wait for them.

        Raises:
            OSError: as `acquire`.
        """
        for turn in range(min(LAYER_SLOTS, len(self.layers))):
            self.want(turn)
        for ready in self._ready[:LAYER_SLOTS]:
            ready.wait()
        if self._error is not None:
            raise self._error

    def arrive(self, turn: int, error: Exception | None = None) -> None:
        """A layer is in its place, or cannot be brought there, which the next step is told."""
        self._error = self._error or error
        for ready in [self._ready[turn]] if self._error is None else self._ready:
            ready.set()

    @abstractmethod
    def want(self, turn: int) -> None:
        """Have a layer brought to its place, which is free, or will be once what was launched is over."""

    @abstractmethod
    def rate(self) -> float:
        """Bytes a second at which layers have come so far."""
