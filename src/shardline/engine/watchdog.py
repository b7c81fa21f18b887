"""Notices a process that lives but does not answer: when to probe it, and when to give it up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum

from shardline.segment.activity import Activity

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
    machine, container or debugger stops this process too, the peer gets a new probe afterwards.
    """

    def __init__(
        self,
        interval: float,
        patience: float,
        signs_of_life: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Probe after `interval` seconds of silence, and give up `patience` seconds after a probe.

        `signs_of_life`: a value that changes whenever the peer answers, or sends anything else.
        """
        self.patience = patience
        self._interval = interval
        self._signs_of_life = signs_of_life
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin anew, as if the peer had just answered."""
        self._heard = self._checked = self._clock()
        self._signs = self._signs_of_life()
        self._probed: float | None = None

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
        if (signs := self._signs_of_life()) != self._signs:
            self._signs, self._heard = signs, now
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


STUCK_SECONDS = 60.0
"""Seconds in which nothing is read, computed or finished, after which loading counts as hanging."""
LOOK_SECONDS = 0.5
"""Seconds between two looks: each reads files of the kernel for every process."""
_SPINNING_SECONDS = 1800.0
"""The same for processes that only use a processor: they may compile."""
_BUSY_SHARE = 0.05
"""Share of one core above which a process counts as busy."""
_OWN_DELAY = 5.0
"""Seconds between two looks after which this process itself was stopped, and begins anew."""


class LoadWatch:
    """Watches processes that load together. Whoever of them gets on speaks for all: others may wait for it."""

    def __init__(self, patience: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`patience`: seconds without progress; None: STUCK_SECONDS."""
        self.patience = STUCK_SECONDS if patience is None else patience
        self._clock = clock
        self._seen: list[Activity] = []
        self._looked = self._advanced = self._busy = clock()

    def look(self, activities: Sequence[Activity]) -> bool:
        """Look at all processes, every LOOK_SECONDS; returns whether any of them has made progress."""
        now, seen = self._clock(), self._seen
        elapsed = now - self._looked
        self._seen, self._looked = list(activities), now
        if elapsed > _OWN_DELAY or len(seen) != len(activities):
            self._advanced = self._busy = now
            return True
        pairs = list(zip(seen, activities, strict=True))
        if any((old.work, old.num_bytes) != (new.work, new.num_bytes) for old, new in pairs):
            self._advanced = self._busy = now
        elif any(new.cpu_seconds - old.cpu_seconds > _BUSY_SHARE * elapsed for old, new in pairs):
            self._busy = now
        return self._busy == now

    @property
    def is_stuck(self) -> bool:
        """Whether loading hangs."""
        spins = self._looked - self._advanced >= max(_SPINNING_SECONDS, self.patience)
        return spins or self._looked - self._busy >= self.patience
