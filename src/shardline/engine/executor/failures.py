"""Which rank is at fault when a step does not end, or several ranks fail at once: the first cause, not the ranks that
only lost a connection or wait for others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from shardline.channel import Channel, readable
from shardline.config.topology import RankGrid
from shardline.engine.executor.rank_processes import RankProcesses
from shardline.messages.worker import RankEnded, RankFailed, WorkerReply
from shardline.segment.progress import RankProgress

_ERROR_SECONDS = 0.3
"""Seconds to look for a rank that was killed when another one reports an error that may follow from it."""
_SEARCH_SECONDS = 0.5
_REMOTE_SEARCH_SECONDS = 1.5
"""Seconds to look for the cause when a rank has only lost its connection to another one."""
_READ_SECONDS = 0.5

_KILLED, _ERROR, _FOLLOWED = range(3)


class FailureSearch:
    """Waits a moment for what the other ranks say, since the first message is often that of a mere victim."""

    def __init__(self, processes: RankProcesses, channels: Mapping[int, Channel[WorkerReply]]) -> None:
        self._processes = processes
        self._channels = channels
        self._errors: dict[int, RankFailed] = {}
        self._closed: set[int] = set()
        self.guilty: list[int] = []
        """The ranks that `describe` has named, unless one of them has reported an error itself."""
        self.suspicious = False
        """Whether a rank failed by itself, so what it ran may be the cause."""

    def describe(self, rank: int, error: RankFailed | None, at_step: str) -> str:
        """What has failed, for people. `rank` has just sent `error`, or has closed its channel if that is None."""
        if error is None:
            self._closed.add(rank)
        else:
            self._errors[rank] = error
        weight = self._search()
        guilty = [one for one in self._failed() if self._weight(one) == weight] or [rank]
        self.suspicious = weight == _ERROR
        if weight == _KILLED:
            self.guilty = guilty
            self.suspicious = any(map(self._processes.crashed_by_itself, guilty))
            return self._processes.describe_ends(guilty) + at_step
        # Errors may follow from each other, so the first one counts.
        first = rank if rank in guilty else guilty[0]
        if (found := self._errors.get(first)) is None:
            self.guilty = [first]
            return self._processes.describe_ends([first]) + at_step
        return f"{self._processes.name_rank(first)} failed{at_step}: {found.message}"

    def _search(self) -> int:
        """Read on until the cause is clear; returns the least weight of a failed rank."""
        began = time.monotonic()
        longest = _REMOTE_SEARCH_SECONDS if self._processes.has_remote else _SEARCH_SECONDS
        while True:
            self._read_all()
            weight = min(map(self._weight, self._failed()), default=_FOLLOWED)
            patience = {_KILLED: 0.0, _ERROR: _ERROR_SECONDS, _FOLLOWED: longest}[weight]
            if time.monotonic() - began >= patience:
                return weight
            time.sleep(0.01)

    def _read_all(self) -> None:
        """Read what ranks have sent; only failures matter any more."""
        open_channels = {
            channel.fileno(): rank
            for rank, channel in self._channels.items()
            if rank not in self._closed and rank not in self._errors
        }
        for fd in readable(open_channels):
            rank = open_channels[fd]
            try:
                message = self._channels[rank].receive(_READ_SECONDS)
            except (EOFError, OSError, TimeoutError, msgspec.MsgspecError):
                self._closed.add(rank)
                continue
            if isinstance(message, RankFailed):
                self._errors[rank] = message
            elif isinstance(message, RankEnded):
                self._processes.note_report(rank, message)
                self._closed.add(rank)

    def _failed(self) -> list[int]:
        """The ranks that have failed, in the order in which this was seen."""
        seen = list(dict.fromkeys([*self._errors, *sorted(self._closed)]))
        return seen + [rank for rank in self._channels if rank not in seen and self._processes.was_killed(rank)]

    def _weight(self, rank: int) -> int:
        if (error := self._errors.get(rank)) is not None:
            return _FOLLOWED if error.consequence else _ERROR
        if self._processes.was_killed(rank):
            return _KILLED
        return _ERROR if self._processes.has_crashed(rank) else _FOLLOWED


def late_ranks(grid: RankGrid, progress: Sequence[RankProgress], step_id: int) -> list[int]:
    """The ranks that cause the delay of step `step_id`, given the progress of all ranks of the engine.

    They belong to the first stage that has not finished the step, since later stages wait for it. They are the ranks
    of that stage that do not wait for another rank. If all of them wait, they are the ranks that have arrived at the
    fewest exchanges.
    """
    unfinished = [line for line in progress if line.finished <= step_id]
    if not unfinished:
        return []
    stage = min(grid.place(line.rank).pp_rank for line in unfinished)
    suspects = [line for line in unfinished if grid.place(line.rank).pp_rank == stage]
    busy = [line.rank for line in suspects if not line.waiting]
    if busy:
        return busy
    fewest = min(line.arrivals for line in suspects)
    return [line.rank for line in suspects if line.arrivals == fewest]
