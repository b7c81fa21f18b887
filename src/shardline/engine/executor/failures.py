"""Which rank is at fault when a step does not end, or several ranks fail at once: the first cause, not the ranks that
only lost a connection or wait for others."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence

import msgspec

from shardline.channel import Channel, readable
from shardline.config.topology import RankGrid
from shardline.engine.children import is_own_end
from shardline.engine.executor.base import ExecutorFailure
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
_NO_NEWS = "has lost its connection to the engine"


class FailureSearch:
    """Waits a moment for what the other ranks say, since the first message is often that of a mere victim."""

    def __init__(self, processes: RankProcesses, channels: Mapping[int, Channel[WorkerReply]]) -> None:
        self._processes = processes
        self._channels = channels
        self._errors: dict[int, RankFailed] = {}
        self._closed: set[int] = set()

    def find(self, rank: int, error: RankFailed | None, at_step: str) -> ExecutorFailure:
        """What has failed. `rank` has just sent `error`, or has closed its channel if that is None. `at_step`: words
        for the step."""
        if error is None:
            self._closed.add(rank)
        else:
            self._errors[rank] = error
        weight = self._search()
        guilty = [one for one in self._failed() if self._weight(one) == weight] or [rank]
        # If a rank failed by itself, what it ran may be the cause.
        suspicious = weight == _ERROR
        if weight == _KILLED:
            suspicious = any(map(self._crashed_by_itself, guilty))
        else:
            # Errors may follow from each other, so the first one counts.
            guilty = [rank] if rank in guilty else guilty[:1]
            if (found := self._errors.get(guilty[0])) is not None:
                words = f"{self._processes.name_rank(guilty[0])} failed{at_step}: {found.message}"
                return ExecutorFailure(words, suspicious=suspicious)
        host_lost = self._were_cut_off(guilty)
        words = self._describe_ends(guilty) + at_step
        return ExecutorFailure(words, host_lost=host_lost, suspicious=suspicious and not host_lost)

    def _search(self) -> int:
        """Read on until the cause is clear; returns the least weight of a failed rank."""
        began = time.monotonic()
        longest = _REMOTE_SEARCH_SECONDS if self._processes.remote else _SEARCH_SECONDS
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
        return seen + [rank for rank in self._channels if rank not in seen and self._was_killed(rank)]

    def _weight(self, rank: int) -> int:
        if (error := self._errors.get(rank)) is not None:
            return _FOLLOWED if error.consequence else _ERROR
        if self._was_killed(rank):
            return _KILLED
        return _ERROR if self._has_crashed(rank) else _FOLLOWED

    def _describe_ends(self, ranks: Sequence[int]) -> str:
        """How the processes of some ranks ended. Ranks that ended in the same way share the words."""
        by_words: dict[str, list[int]] = {}
        for rank in ranks:
            remote = self._processes.remote.get(rank)
            how = (remote.end or _NO_NEWS) if remote else self._processes.local[rank].describe_end()
            by_words.setdefault(how, []).append(rank)
        return "; ".join(
            f"{self._processes.name_rank(same[0])} {how}"
            if len(same) == 1
            else f"{self._processes.name_ranks(same)}: each {how}"
            for how, same in by_words.items()
        )

    def _was_killed(self, rank: int) -> bool:
        """Whether the rank ended or stopped by something outside it: a signal, or the loss of its host.

        An abort is no such signal: libraries abort a process when another rank has gone.
        """
        if (remote := self._processes.remote.get(rank)) is not None:
            return bool(remote.end) and (remote.code is None or _is_kill(remote.code))
        child = self._processes.local[rank]
        code = child.poll()
        return child.is_silent() if code is None else _is_kill(code)

    def _were_cut_off(self, ranks: Sequence[int]) -> bool:
        """Whether the host of one of these ranks is lost, or the connection to it."""
        remotes = [self._processes.remote[rank] for rank in ranks if rank in self._processes.remote]
        return any(remote.host_lost or not remote.end for remote in remotes)

    def _has_crashed(self, rank: int) -> bool:
        """Whether the process has ended with an error, or it cannot be known."""
        remote = self._processes.remote.get(rank)
        return remote.code != 0 if remote is not None else self._processes.local[rank].poll() not in (None, 0)

    def _crashed_by_itself(self, rank: int) -> bool:
        """Whether the process has ended, and nothing from outside has ended it."""
        remote = self._processes.remote.get(rank)
        return is_own_end(remote.code if remote is not None else self._processes.local[rank].poll())


def _is_kill(code: int) -> bool:
    return code < 0 and code != -signal.SIGABRT


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
