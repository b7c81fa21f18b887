"""Choices that may have ended a replica are suspects: they go on alone, where they harm nobody else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardline.messages.request import Request

SUSPECT_AFTER = 2
"""A choice that was present at so many failures is a suspect, whatever their causes were."""

CLEARED_AFTER = 8
"""Tokens that clear a suspect. Each time that a choice is suspected again, it needs four times as many."""

ONE_CUT = 15.0
"""Seconds in which all losses of hosts are one failure: a cut takes several replicas away, and some of them again while
it heals."""


@dataclass(slots=True)
class RunningChoice:
    """A choice that has not finished, with the tokens that its user may have seen already."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Which replicas failed that ran this choice, since it was cleared, and why."""
    is_suspect: bool = False
    """It may be the cause of a failure, so it goes on alone; see `Quarantine`."""
    clearing_tokens: int = CLEARED_AFTER
    """How many tokens clear it of the next suspicion."""
    cleared_at: int = 0
    """The number of its tokens that clears a suspect."""
    sent_at: float = 0.0
    """When it was last sent to a replica."""
    pending_chunks: int = 0
    """Chunks of its prompt that are still to be computed, as the router counts them."""
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


class ReplicaState(NamedTuple):
    """What the choice of a replica depends on."""

    runs: bool
    is_starting: bool
    """It does not run, but will soon."""
    num_choices: int
    """Choices on it."""


class Quarantine:
    """The suspects, and the replica that is kept free for them.

    The owner calls `settle` after every change, and does what it asks for. Nothing may be sent to `replica` but what
    `settle` returns, and all choices on it but `alone` must leave.
    """

    def __init__(self) -> None:
        self.replica: int | None = None
        """The replica in quarantine; None: there is none."""
        self.alone: RunningChoice | None = None
        """The suspect that runs there."""
        self.suspects: dict[str, RunningChoice] = {}
        """Those that wait for their turn, in their order."""

    def add(self, choice: RunningChoice) -> None:
        """Let a suspect wait for its turn. It must not be on any replica."""
        self.suspects[choice.request.request_id] = choice

    def take_all(self) -> list[RunningChoice]:
        """The suspects that wait, which do so no longer."""
        taken = list(self.suspects.values())
        self.suspects.clear()
        return taken

    def forget_request(self, request_id: str) -> None:
        """Note that a choice has ended. Others are ignored."""
        self.suspects.pop(request_id, None)
        if self.alone is not None and self.alone.request.request_id == request_id:
            self.alone = None

    def lose_replica(self, index: int) -> RunningChoice | None:
        """Note that a replica is lost; returns the suspect that was alone on it."""
        if index != self.replica:
            return None
        lost, self.replica, self.alone = self.alone, None, None
        return lost

    def settle(self, replicas: Sequence[ReplicaState]) -> RunningChoice | None:
        """Clear the suspect that has got on, choose a replica, and return the suspect that must now be sent to it."""
        if self.alone is not None:
            if not self.alone.try_to_clear():
                return None
            self.alone = None
        if not self.suspects:
            self.replica = None
            return None
        if self.replica is None:
            self.replica = _choose_replica(replicas)
        if self.replica is None or replicas[self.replica].num_choices:
            return None
        self.alone = self.suspects.pop(next(iter(self.suspects)))
        return self.alone


def _choose_replica(replicas: Sequence[ReplicaState]) -> int | None:
    """One that is empty while another one serves everybody else. If none can become so soon, the emptiest one."""
    running = [index for index, replica in enumerate(replicas) if replica.runs]
    best = min(running, key=lambda index: replicas[index].num_choices, default=None)
    if best is None or not any(replica.is_starting for replica in replicas):
        return best
    return best if len(running) > 1 and not replicas[best].num_choices else None
