"""What the front keeps of running choices, so that another replica can go on with them, and when it gives up."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from shardline.types import Request, SequenceOutput

MAX_FAILURES = 3
"""A choice that was present at so many failures ends with an error: it may be their cause."""

ONE_CUT = 15.0
"""Seconds in which all losses of hosts are one failure: a cut takes several replicas away, and some of them again while
it heals."""

RESTART_WINDOW = 300.0
"""Seconds in which a replica may restart --max-restarts times."""


@dataclass(slots=True)
class RunningChoice:
    """A choice that has not finished, with the tokens that its user may have seen already."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Why each replica failed that ran this choice."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the first replica found in its cache; None: no output has come."""
    host_lost_at: float = -math.inf
    """When the last failure was counted whose cause was the loss of a host."""

    def note_failure(self, now: float, why: str, *, host_lost: bool) -> None:
        """The replica has failed at the time `now`. `host_lost`: a host of it is away."""
        if host_lost:
            if now - self.host_lost_at < ONE_CUT:
                return
            self.host_lost_at = now
        self.failures.append(why)

    def correct_output(self, output: SequenceOutput) -> SequenceOutput:
        """The output with the number of cached tokens that it would have if nothing had failed."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
            return output
        return msgspec.structs.replace(output, num_cached_tokens=self.num_cached_tokens)

    def as_request(self) -> Request:
        """The request for a replica that goes on after the tokens that are known."""
        if not self.token_ids:
            return self.request
        return msgspec.structs.replace(self.request, output_token_ids=list(self.token_ids))


class RestartLimit:
    """Says whether a replica may restart once more."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: restarts within RESTART_WINDOW."""
        self._most = most
        self._clock = clock
        self._times: deque[float] = deque()

    def allow_restart(self) -> bool:
        """Count one more restart, unless there were too many of late."""
        now = self._clock()
        while self._times and now - self._times[0] > RESTART_WINDOW:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
