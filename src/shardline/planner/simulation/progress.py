"""A line on the terminal that says how far a simulation is."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_SHOW_AFTER = 2.0
"""Seconds. A shorter simulation needs no line."""
_SECONDS_BETWEEN = 0.5


class Progress:
    """Counts requests that have ended. It writes only to a terminal."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        """`total` is the number of requests; `stream` is None for no line."""
        self.total = total
        self._stream = stream if stream is not None and stream.isatty() else None
        self._started = self._shown = time.monotonic()
        self._has_line = False

    @classmethod
    def on_stderr(cls, total: int) -> Progress:
        """Progress that people see if they look at standard error."""
        return cls(total, sys.stderr)

    def show(self, done: int, now: float | None = None) -> None:
        """Write the line anew, unless that was just done. `now` is the virtual time, if all replicas share it."""
        seconds = time.monotonic()
        if self._stream is None or seconds - self._started < _SHOW_AFTER or seconds - self._shown < _SECONDS_BETWEEN:
            return
        self._shown, self._has_line = seconds, True
        rate = done / (seconds - self._started)
        left = f", {_minutes((self.total - done) / rate)} left" if rate and self.total else ""
        at = "" if now is None else f"at {now:,.1f} s: "
        share = f" of {self.total:,} ({done / self.total:.0%})" if self.total else ""
        self._stream.write(f"\r\x1b[Ksimulating, {at}{done:,}{share} requests done, {rate:,.0f} a second{left}")
        self._stream.flush()

    def end(self) -> None:
        """Remove the line."""
        if self._stream is not None and self._has_line:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d} min"
