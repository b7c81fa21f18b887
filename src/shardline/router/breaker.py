"""When a backend that fails is left alone, and when it is tried again."""

from __future__ import annotations

import math

_FAILURES = 3
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 60.0
_CALM_SECONDS = 60.0
"""A backend that answers for so long is as good as one that has never failed."""


class Breaker:
    """Closed: requests go through. Open: none do. Half open: one does, and its outcome decides.

    After three failures in a row it opens for 1 s, and for twice as long after each trial that fails, up to a minute.
    So it does if it opens again within a minute of answering. Times are seconds on a clock of the caller's.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self._seconds = _FIRST_SECONDS
        self._open_until: float | None = None
        self._last_open_until = -math.inf
        self._is_trying = False

    def state(self, now: float) -> str:
        """closed, open or half-open."""
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def allows(self, now: float) -> bool:
        """Whether a request may go through now."""
        state = self.state(now)
        return state == "closed" or (state == "half-open" and not self._is_trying)

    def begin(self, now: float) -> None:
        """A request goes through."""
        self._is_trying = self.state(now) == "half-open"

    def succeed(self) -> None:
        """The backend has answered, be it with a refusal of what the client asks."""
        self._num_failures, self._open_until, self._is_trying = 0, None, False

    def fail(self, now: float) -> None:
        """The backend has not answered, or has answered that it failed."""
        self._num_failures += 1
        if self._is_trying or self._num_failures >= _FAILURES:
            calm = now - self._last_open_until  # below 0: requests that were under way when it opened
            if self._is_trying or 0.0 <= calm < _CALM_SECONDS:
                self._seconds = min(2 * self._seconds, _MOST_SECONDS)
            elif calm >= _CALM_SECONDS:
                self._seconds = _FIRST_SECONDS
            self._open_until = self._last_open_until = now + self._seconds
        self._is_trying = False

    def give_up(self) -> None:
        """The client has left before the backend's outcome was known."""
        self._is_trying = False
