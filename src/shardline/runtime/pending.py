"""A step between its launch and its result."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shardline.runtime.backends.base import Download
from shardline.types import StepResult


class PendingStep:
    """A step that was launched and may still run on a device."""

    def __init__(self, download: Download, finish: Callable[[list[Tensor]], StepResult | None]) -> None:
        """`finish` makes the result from the downloaded tensors."""
        self._download = download
        self._finish: Callable[[list[Tensor]], StepResult | None] | None = finish
        self._result: StepResult | None = None

    @property
    def is_over(self) -> bool:
        """Whether the step was over when its launch returned, so that no wait is needed."""
        return self._download.is_immediate

    def wait(self) -> None:
        """Wait until the device has finished the step; may be called from any thread."""
        self._download.wait()

    def result(self) -> StepResult | None:
        """The result of the step, as `Runner.run_step` returns it; waits for it. Call it in the runner's thread, for
        the oldest step first."""
        if self._finish is not None:
            self._result = self._finish(self._download.wait())
            self._finish = None  # only now: a step that failed fails again
        return self._result
