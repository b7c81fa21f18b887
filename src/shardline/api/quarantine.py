"""Suspects go on alone: which replica is kept free for them, and whose turn it is.

A choice that ran when a replica stalled may be the cause, and would take the next replica down as well. So one replica
at most is in quarantine: it runs one suspect and nothing else, until the suspect has got on by a few tokens. If the
replica is lost meanwhile, the suspect was the cause, and nobody else is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardline.api.failover import RunningChoice


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
        self._suspects: dict[str, RunningChoice] = {}
        """Those that wait for their turn, in their order."""

    def __len__(self) -> int:
        """How many suspects wait for their turn."""
        return len(self._suspects)

    def add(self, choice: RunningChoice) -> None:
        """Let a suspect wait for its turn. It must not be on any replica."""
        self._suspects[choice.request.request_id] = choice

    def take_all(self) -> list[RunningChoice]:
        """The suspects that wait, which do so no longer."""
        taken = list(self._suspects.values())
        self._suspects.clear()
        return taken

    def forget_request(self, request_id: str) -> None:
        """Note that a choice has ended. Others are ignored."""
        self._suspects.pop(request_id, None)
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
        if not self._suspects:
            self.replica = None
            return None
        if self.replica is None:
            self.replica = _choose_replica(replicas)
        if self.replica is None or replicas[self.replica].num_choices:
            return None
        self.alone = self._suspects.pop(next(iter(self._suspects)))
        return self.alone


def _choose_replica(replicas: Sequence[ReplicaState]) -> int | None:
    """One that is empty while another one serves everybody else. If none can become so soon, the emptiest one."""
    running = [index for index, one in enumerate(replicas) if one.runs]
    best = min(running, key=lambda index: replicas[index].num_choices, default=None)
    if best is None or not any(one.is_starting for one in replicas):
        return best
    return best if len(running) > 1 and not replicas[best].num_choices else None
