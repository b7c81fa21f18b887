"""A step between its launch and its result."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shardline.runtime.download import Download
from shardline.types import StepResult


class PendingStep:
    """A step that was launched and may still run on a device."""

    def __init__(self, download: Download | None, finish: Callable[[list[Tensor]], StepResult | None]) -> None:
        """`download`: what `finish` makes the result of; None: the step is over."""
        self._download = download
        self._finish: Callable[[list[Tensor]], StepResult | None] | None = finish
        self._result: StepResult | None = None

    @property
    def is_over(self) -> bool:
        """Whether no device has to be waited for."""
        return self._download is None

    def wait(self) -> None:
        """Until the device has finished the step; from any thread."""
        if self._download is not None:
            self._download.wait()

    def result(self) -> StepResult | None:
        """What Runner.run returns, once it is there; in the runner's thread, oldest steps first."""
        if self._finish is not None:
            tensors = [] if self._download is None else self._download.wait()
            self._result = self._finish(tensors)
            self._finish = self._download = None
        return self._result
