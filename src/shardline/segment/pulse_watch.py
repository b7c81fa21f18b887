"""Tells which processes give no sign of life: children by their pulse, and a process's own main loop."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

SILENCE = 4.0
"""Seconds without a sign of life after which a process counts as stopped."""

CHECK_INTERVAL = 0.25
"""Seconds between two looks at a pulse. A process that is stopped is found SILENCE and up to two of these later."""

START_SILENCE = 40.0
"""The same for a process that has not begun to show signs of life: Python may come from a slow disk. It is shorter than
what loading may pause, so that this process is named and not those that wait for it."""
_OWN_DELAY = 2.0
"""A watcher that is this late was stopped itself, and begins anew."""
_PATIENCE = 10.0
"""Seconds that a round of a main loop may take: it may wait for processes that end."""
_log = logging.getLogger(__name__)


class PulseWatch:
    """Tells whether a process has been without a sign of life for `patience` seconds that the watcher saw pass."""

    def __init__(
        self,
        read_beats: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        patience: float = SILENCE,
    ) -> None:
        """`read_beats`: a number that changes while the process lives. It is positive once the process has begun."""
        self._read_beats = read_beats
        self._clock = clock
        self._patience = patience
        self._beats = 0
        self._changed = self._checked = clock()

    def is_silent(self) -> bool:
        """Look again. Call this every CHECK_INTERVAL seconds; a watcher that comes late gives the process new time."""
        now, beats = self._clock(), self._read_beats()
        if beats != self._beats or now - self._checked > _OWN_DELAY:
            self._changed = now
        self._beats, self._checked = beats, now
        return now - self._changed >= (self._patience if beats > 0 else START_SILENCE)


class LoopWatch:
    """Watches a main loop from a thread of its own, while it is entered. The loop calls `note_round` once a second."""

    def __init__(self, name: str) -> None:
        """`name`: of the process, for the log."""
        self._name = name
        self._rounds = 0
        self._is_over = threading.Event()

    def __enter__(self) -> LoopWatch:
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()

    def note_round(self) -> None:
        """The loop has come round."""
        self._rounds += 1

    def _watch(self) -> None:
        watch = PulseWatch(lambda: self._rounds, patience=_PATIENCE)
        while not watch.is_silent():
            if self._is_over.wait(CHECK_INTERVAL):
                return
        _log.error("the %s hangs: its loop has not come round for %g s; it ends", self._name, _PATIENCE)
        faulthandler.dump_traceback()
        os._exit(1)
