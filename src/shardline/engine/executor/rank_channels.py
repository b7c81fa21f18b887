"""The channels between an engine and its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from shardline.channel import Channel, encode_message, readable
from shardline.engine.executor.base import ExecutorFailure
from shardline.engine.executor.failures import FailureSearch
from shardline.engine.executor.rank_processes import RankProcesses
from shardline.engine.executor.rank_store import RankStore
from shardline.engine.executor.step_lines import FRAME_TIMEOUT, StepLines
from shardline.messages.worker import (
    RankBeat,
    RankEnded,
    RankFailed,
    RankStarted,
    StoreAdd,
    StoreGet,
    StoreSet,
    WorkerReply,
)
from shardline.segment.pulse_watch import CHECK_INTERVAL


class RankChannels:
    """Sends to ranks, receives from them, and turns the end of one into an ExecutorFailure that names it."""

    def __init__(
        self,
        processes: RankProcesses,
        lines: StepLines,
        on_beat: Callable[[int, RankBeat], None],
        at_step: Callable[[], str],
    ) -> None:
        """`lines` lead to ranks on other hosts. `on_beat` takes what a node says of its rank; `at_step` is the place
        of a failure in words."""
        self._processes = processes
        self._on_beat = on_beat
        self._at_step = at_step
        self._channels: dict[int, Channel[WorkerReply]] = {}
        self._ranks: dict[int, int] = {}
        """The rank of each channel's descriptor."""
        self._looked = 0.0
        """When silent and lost ranks were last looked for."""
        self._lines = lines
        self.store = RankStore()

    def start_ranks(self, count: int) -> None:
        """Start all ranks, and open their channels; errors are those of `send`."""
        for rank in range(count):
            self._channels[rank], start = self._processes.start_rank(rank, self._lines.address)
            self._ranks[self._channels[rank].fileno()] = rank
            self.send(rank, encode_message(start))

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when a rank sends something or ends."""
        return [*self._ranks, *self._lines.fds]

    def send(self, rank: int, body: bytes) -> None:
        """Send an encoded message.

        Raises:
            ExecutorFailure: the rank does not read, or has ended.
            ValueError: the rank says that the configuration or the checkpoint is at fault.
        """
        try:
            self._channels[rank].send_encoded(body)
        except BlockingIOError:
            raise self._unread(rank) from None
        except OSError:
            # It is gone, but its last words, if there are any, have not been read.
            self._receive(rank)
            raise self._failure(rank) from None

    def send_all(self, body: bytes) -> None:
        """Send an encoded message to all ranks; errors are those of `send`."""
        for rank in self._channels:
            self.send(rank, body)

    def send_step(self, rank: int, body: bytes) -> None:
        """Send an encoded message for the thread that runs steps; errors are those of `send`."""
        if rank not in self._lines.lines:
            self.send(rank, body)
            return
        try:
            self._lines.send(rank, body)
        except BlockingIOError:
            raise self._unread(rank) from None

    def send_step_to_all(self, body: bytes) -> None:
        """Send all ranks an encoded message for the thread that runs steps; errors are those of `send`."""
        for rank in self._channels:
            self.send_step(rank, body)

    def receive(self, timeout: float) -> Iterator[tuple[int, WorkerReply]]:
        """One message of each rank that has sent something, after waiting for the first one.

        Messages of the store are handled here as well.

        Raises:
            ExecutorFailure: a rank failed, ended, or gives no sign of life.
            ValueError: a rank says that the configuration or the checkpoint is at fault.
        """
        ready = readable(self.fds, timeout)
        if (now := time.monotonic()) - self._looked >= CHECK_INTERVAL:
            self._looked = now
            for lost in (self._processes.find_silent(), self._lines.find_lost()):
                if lost is not None:
                    raise self._failure(lost)
        for fd in ready:
            if (rank := self._ranks.get(fd)) is not None:
                yield rank, self._receive(rank)
            elif (reply := self._lines.receive(rank := self._lines.fds[fd])) is not None:
                yield rank, reply

    def close(self) -> None:
        """Close all channels; the ranks end."""
        self._lines.close()
        for channel in self._channels.values():
            channel.close()

    def _receive(self, rank: int) -> WorkerReply:
        try:
            reply = self._channels[rank].receive(FRAME_TIMEOUT)
        except (EOFError, OSError, TimeoutError, msgspec.MsgspecError):
            raise self._failure(rank) from None
        if isinstance(reply, (RankStarted, RankBeat, RankEnded)):
            self._processes.note_report(rank, reply)
            if isinstance(reply, RankBeat):
                self._on_beat(rank, reply)
            elif isinstance(reply, RankEnded):
                raise self._failure(rank)
        elif isinstance(reply, (StoreSet, StoreGet, StoreAdd)):
            for asking, answer in self.store.handle(rank, reply):
                self.send(asking, encode_message(answer))
        elif isinstance(reply, RankFailed):
            if reply.user_error:
                raise ValueError(reply.message)
            raise self._failure(rank, reply)
        return reply

    def _unread(self, rank: int) -> ExecutorFailure:
        words = f"{self._processes.name_rank(rank)} does not read its plans{self._at_step()}"
        # Between hosts it may be the connection.
        return ExecutorFailure(words, suspicious=rank not in self._lines.lines, stalled_for=FRAME_TIMEOUT)

    def _failure(self, rank: int, error: RankFailed | None = None) -> ExecutorFailure:
        search = FailureSearch(self._processes, self._channels)
        words = search.describe(rank, error, self._at_step())
        host_lost = self._processes.were_cut_off(search.guilty)
        return ExecutorFailure(words, host_lost=host_lost, suspicious=search.suspicious and not host_lost)
