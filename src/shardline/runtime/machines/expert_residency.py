"""Which experts of a rank are in fast memory, if it does not hold all of them, and which leave it for others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shardline.config.fields import format_bytes

_log = logging.getLogger(__name__)

_TOLD_STEPS = (16, 256)
"""Steps after which the log says what they have cost."""
_RECENT_STEPS = 64
"""Steps over which it is counted how often an expert is chosen."""


class ExpertResidency:
    """Layers are rows, in the order of steps.

    What is expected to be needed last leaves first: layers follow each other in a circle, and an expert of which a
    share p of the steps has need is expected to be left out (1 - p) / p times.
    """

    def __init__(self, counts: Sequence[int], sizes: Sequence[int], room: int, source: str) -> None:
        """`counts`: number of experts of each layer, `sizes`: the bytes of each of them, `room`: bytes for all that
        are there; there is always room for all of a layer, which a step may need. `source`: where they are read from,
        for messages."""
        self._source = source
        self.counts = list(counts)
        self.sizes: NDArray[np.int64] = np.array(sizes, np.int64)
        self._in_layers = [count * size for count, size in zip(counts, sizes, strict=True)]
        self.room = max([room, *self._in_layers])
        self.present: NDArray[np.bool_] = np.zeros((len(counts), max(counts, default=0)), bool)
        """[layers, experts]: whether an expert is there, or will be once it is read."""
        self._needed: NDArray[np.float64] = np.zeros(self.present.shape)
        """[layers, experts]: in which share of the last steps it was chosen."""
        self._num_steps = self._num_asked = self._num_read = self._read_bytes = 0
        self._last_row = len(counts)
        self.waited = 0.0
        """Seconds that steps have waited for experts."""

    @property
    def extent(self) -> str:
        """How much stays, for messages."""
        return f"{format_bytes(min(self.room, sum(self._in_layers)))} of {format_bytes(sum(self._in_layers))}"

    def choose(self, row: int, ids: torch.Tensor, first: int) -> NDArray[np.int64]:
        """Count the experts of `ids`, in host memory, that the rank holds, which are the ones from `first` on; returns
        them, each once."""
        if row <= self._last_row:  # layers that need nothing may be passed over
            self._begin_step()
        self._last_row = row
        experts: NDArray[np.int64] = np.unique(ids.numpy()).astype(np.int64) - first
        experts = experts[(experts >= 0) & (experts < self.counts[row])]
        needed = self._needed[row]
        needed *= 1 - 1 / _RECENT_STEPS
        needed[experts] += 1 / _RECENT_STEPS
        self._num_asked += len(experts)
        return experts

    def lacking(self, num_bytes: int) -> int:
        """How many bytes have to leave before there is room for so many more; not above zero: none."""
        return num_bytes - self.room + int(self.present.sum(1) @ self.sizes)

    def leaving(self, num_bytes: int, current: int, staying: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """The experts (row, number) that leave, so many bytes or more, but none of `staying` [layers, experts]; they
        are no longer present. `current`: the row that computes."""
        if num_bytes <= 0:
            return
        rows, experts = np.nonzero(self.present & ~staying)
        steps = ((rows - current - 1) % len(self.counts) + 1) / len(self.counts)
        steps += 1 / np.maximum(self._needed[rows, experts], 1e-6)
        order = np.argsort(-steps, kind="stable")
        count = int(np.searchsorted(np.cumsum(self.sizes[rows[order]]), num_bytes)) + 1
        for index in order[:count].tolist():
            row, expert = int(rows[index]), int(experts[index])
            yield row, expert
            self.present[row, expert] = False

    def come(self, row: int, experts: NDArray[np.int64]) -> None:
        """Count experts that are being read."""
        self.present[row, experts] = True
        self._num_read += len(experts)
        self._read_bytes += len(experts) * int(self.sizes[row])

    def _begin_step(self) -> None:
        if self._num_steps in _TOLD_STEPS:
            _log.info(
                "%d steps: each read %s of experts from %s, %.0f%% of those that were chosen, and waited %.3f s for "
                "them",
                self._num_steps,
                format_bytes(self._read_bytes // self._num_steps),
                self._source,
                100 * self._num_read / max(1, self._num_asked),
                self.waited / self._num_steps,
            )
        self._num_steps += 1
