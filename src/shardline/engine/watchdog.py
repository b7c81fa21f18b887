"""Notices a process that lives but does not answer: when to probe it, and when to give it up."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

_LONGEST_INTERVAL = 5.0
_OWN_DELAY = 1.0
"""Seconds by which a check may be late before the watchdog takes its own process for the one that was stopped."""


def probe_interval(step_timeout: float) -> float:
    """Seconds of silence after which a process is probed."""
    return min(step_timeout / 4, _LONGEST_INTERVAL)


class Verdict(Enum):
    """What the owner of a watchdog must do now."""

    WAIT = "wait"
    PROBE = "probe"
    """Ask the peer for an answer."""
    LOST = "lost"
    """The peer owes an answer for too long."""


class Watchdog:
    """Watches one peer, or several that are probed together.

    Only the time since an unanswered probe counts against the peer: silence alone may be a long step. If the whole
    machine, container or debugger stops this process too, the peer gets a new probe afterwards. Another thread may call
    `note_life`.
    """

    def __init__(self, interval: float, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Probe after `interval` seconds of silence, and give up `patience` seconds after a probe."""
        self.patience = patience
        self._interval = interval
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin anew, as if the peer had just answered."""
        self._heard = self._checked = self._clock()
        self._probed: float | None = None

    def note_life(self) -> None:
        """The peer answered, or sent anything else."""
        self._heard = self._clock()

    @property
    def silence(self) -> float:
        """Seconds since the peer last showed that it gets on."""
        return self._clock() - self._heard

    def check(self) -> Verdict:
        """What to do now. Call it again within `seconds_to_check`."""
        now = self._clock()
        if now - self._checked > self._interval + _OWN_DELAY:
            self.restart()
            return Verdict.WAIT
        self._checked = now
        if self._probed is not None and self._heard < self._probed:
            return Verdict.LOST if now - self._probed >= self.patience else Verdict.WAIT
        if now - self._heard < self._interval:
            return Verdict.WAIT
        self._probed = now
        return Verdict.PROBE

    def seconds_to_check(self) -> float:
        """Seconds until the next check is due."""
        now = self._clock()
        if self._probed is not None and self._heard < self._probed:
            # No longer than an interval: a late check is how the watchdog notices that it was stopped itself.
            return min(self._interval, max(0.0, self._probed + self.patience - now))
        return max(0.0, self._heard + self._interval - now)
