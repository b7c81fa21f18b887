"""What the front keeps of running choices, so that another replica can go on with them, and which it suspects."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from shardline.messages.request import Request, SequenceOutput

SUSPECT_AFTER = 2
"""A choice that was present at so many failures is a suspect, whatever their causes were."""

CLEARED_AFTER = 8
"""Tokens that clear a suspect. Each time that a choice is suspected again, it needs four times as many."""

_DELAY = 0.5
"""Seconds by which the engine may have planned a request later than it was sent."""

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
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Which replicas failed that ran this choice, since it was cleared, and why."""
    is_suspect: bool = False
    """It may be the cause of a failure, so it goes on alone; see `api.quarantine`."""
    clearing_tokens: int = CLEARED_AFTER
    """How many tokens clear it of the next suspicion."""
    cleared_at: int = 0
    """The number of its tokens that clears a suspect."""
    sent_at: float = 0.0
    """When it was last sent to a replica."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the first replica found in its cache; None: no output has come."""
    host_lost_at: float = -math.inf
    """When the last failure was counted whose cause was the loss of a host."""

    def note_failure(
        self, replica: int, now: float, why: str, *, host_lost: bool = False, suspicious: bool = False
    ) -> None:
        """The replica has failed at the time `now`.

        `host_lost`: a host of it is away. `suspicious`: what ran may be the cause, and this choice ran.
        """
        if host_lost:
            if now - self.host_lost_at < ONE_CUT:
                return
            self.host_lost_at = now
        self.failures.append((replica, why))
        if not self.is_suspect and (suspicious or len(self.failures) >= SUSPECT_AFTER):
            self.is_suspect = True
            self.cleared_at = len(self.token_ids) + self.clearing_tokens
            self.clearing_tokens *= 4

    def try_to_clear(self) -> bool:
        """Whether it is no suspect any more: it has got on beyond the place where it was suspected."""
        if self.is_suspect and len(self.token_ids) >= self.cleared_at:
            self.is_suspect = False
            self.failures.clear()
        return not self.is_suspect

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


def ran_at(choices: Sequence[RunningChoice], stalled_at: float) -> list[RunningChoice]:
    """The choices that the engine may have been running when it last got on, at the time `stalled_at`.

    An engine that has nothing to do plans a request at once. One that has stalled plans none that comes later.
    """
    last = max(stalled_at, min((choice.sent_at for choice in choices), default=0.0)) + _DELAY
    return [choice for choice in choices if choice.sent_at <= last]


class RestartLimit:
    """Says whether a replica may restart once more."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: restarts within RESTART_WINDOW."""
        self._most = most
        self._clock = clock
        self._times: deque[float] = deque()

    def forgive(self) -> None:
        """Do not count the latest restart any more: a request had made it necessary."""
        if self._times:
            self._times.pop()

    def allow_restart(self) -> bool:
        """Count one more restart, unless there were too many of late."""
        now = self._clock()
        while self._times and now - self._times[0] > RESTART_WINDOW:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
