"""Ends a process whose main loop hangs, so that whoever watches it can start it again."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading

from shardline.segment.pulse import CHECK_INTERVAL, PulseWatch

_PATIENCE = 10.0
"""Seconds that one round may take: it may wait for processes that end."""

_log = logging.getLogger(__name__)


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
