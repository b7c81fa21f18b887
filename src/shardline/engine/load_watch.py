"""Notices processes that live but get nowhere while they load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shardline.segment.activity import Activity

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
