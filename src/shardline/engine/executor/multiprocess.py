"""One process per rank; plans go over a channel or a line each, tensors over the transport of each group of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from shardline.channel import Channel, encode_message, readable
from shardline.deployment.deployment import Deployment
from shardline.deployment.segment import segment_layout
from shardline.engine.executor.base import ControlAnswers, Executor, ExecutorFailure
from shardline.engine.executor.failures import FailureSearch, late_ranks
from shardline.engine.executor.loading import load_ranks
from shardline.engine.executor.rank_processes import RankProcesses
from shardline.engine.executor.rank_store import RankStore
from shardline.engine.executor.step_answers import StepAnswers
from shardline.engine.executor.step_lines import FRAME_TIMEOUT, StepLines
from shardline.engine.watchdog import Verdict, Watchdog, probe_interval
from shardline.messages.control import Control, ControlDone, Probe
from shardline.messages.stats import RankTimes
from shardline.messages.step import StepPlan, StepResult, rank_steps
from shardline.messages.worker import (
    RankBeat,
    RankEnded,
    RankFailed,
    RankReport,
    RankStarted,
    RunStep,
    StepDone,
    StoreAdd,
    StoreGet,
    StoreSet,
    WorkerReply,
)
from shardline.segment.expert_load import Counts
from shardline.segment.progress import RankProgress
from shardline.segment.pulse import note_work
from shardline.segment.pulse_watch import CHECK_INTERVAL


class MultiprocessExecutor(Executor):
    """Starts the ranks, watches their channels, and names the one that dies, is late or does not answer."""

    def __init__(self, deployment: Deployment, engine: int, streams: Mapping[int, int]) -> None:
        """`streams`: for each rank on another host, the descriptor of the socket that leads to it."""
        self._deployment = deployment
        self.max_in_flight = deployment.max_in_flight
        self._num_ranks = deployment.grid.world_size
        self._replica_size = deployment.grid.replica_size
        self._processes = RankProcesses(deployment, engine, streams, FRAME_TIMEOUT)
        here = deployment.placements[engine][0].host
        self._lines = StepLines(deployment.machine.hosts[here].address, self._processes.nonce, list(streams))
        self._channels: dict[int, Channel[WorkerReply]] = {}
        self._ranks: dict[int, int] = {}
        """The rank of each channel's descriptor."""
        self._store = RankStore()
        self._submitted: list[int] = []
        self._results = StepAnswers(deployment.grid)
        interval = probe_interval(deployment.step_timeout)
        self._num_heard = 0
        """Steps and commands that all ranks have answered."""
        self._watchdog = Watchdog(interval, deployment.step_timeout - interval, lambda: self._num_heard)
        self._searched = 0.0
        """When silent and lost ranks were last looked for."""
        self._work = 0
        """Pieces of work that all ranks had finished when a step last took long."""
        self.answers = ControlAnswers(self._num_ranks)
        layout = segment_layout(deployment, engine, here)
        self._progress = layout.progress(self._processes.segment)
        self._remote_progress: dict[int, RankProgress] = {}
        self._remote_load: dict[int, Counts] = {}
        self._load = layout.expert_load(self._processes.segment)

    def start(self) -> list[RankReport]:
        self._start_ranks()
        reports, self.allocation = load_ranks(
            self._deployment, self._processes, self._send_to_all, self._receive, self._store
        )
        self._lines.open()  # steps of ranks on other hosts take these from now on
        self._watchdog.restart()
        return reports

    def _start_ranks(self) -> None:
        for rank in range(self._num_ranks):
            self._channels[rank], start = self._processes.start_rank(rank, self._lines.address)
            self._ranks[self._channels[rank].fileno()] = rank
            self._send(rank, encode_message(start))

    def submit_step(self, plans: Sequence[StepPlan]) -> None:
        messages = [encode_message(RunStep(step)) for step in rank_steps(plans)]
        self._submitted.append(plans[0].step_id)
        self._results.expect(plans)
        for rank in range(self._num_ranks):
            self._send_step(rank, messages[rank // self._replica_size])

    def collect_results(self) -> list[StepResult]:
        looked = last_progress = time.monotonic()
        while not self._results.has_oldest:
            for rank, reply in self._receive(CHECK_INTERVAL):
                if isinstance(reply, StepDone):
                    self._results.put(rank, reply.result)
                elif isinstance(reply, ControlDone):
                    self.answers.add(rank, reply)
            if (now := time.monotonic()) - looked < CHECK_INTERVAL:
                continue
            looked = now
            if (work := self._processes.work) != self._work:
                last_progress, self._work = now, work
                note_work()  # for the front, which watches this process
            elif now - last_progress >= self._deployment.step_timeout and not self._results.has_oldest:
                waited = self._deployment.step_timeout
                raise ExecutorFailure(self._stall(), suspicious=True, stalled_for=waited)
        self._submitted.pop(0)
        self._num_heard += 1
        note_work()
        return self._results.take_oldest()

    def submit_control(self, control: Control) -> None:
        self.answers.expect(control)
        message = encode_message(control)
        for rank in range(self._num_ranks):
            self._send_step(rank, message)

    def watched_fds(self) -> list[int]:
        return [*self._ranks, *self._lines.fds]

    def check_ranks(self) -> float:
        for rank, reply in self._receive(0.0):
            if isinstance(reply, ControlDone) and self.answers.add(rank, reply):
                self._num_heard += 1
        verdict = self._watchdog.check()
        if verdict is Verdict.PROBE:
            self.submit_control(Control.carry(0, Probe()))
        elif verdict is Verdict.LOST:
            names = " ".join(self._processes.name_rank(rank) for rank in self.answers.missing(0))
            words = f"{names} did not answer a probe within {self._watchdog.patience:g} s while idle"
            raise ExecutorFailure(words, suspicious=True, stalled_for=self._watchdog.silence)
        return min(CHECK_INTERVAL, self._watchdog.seconds_to_check())

    def expert_load(self) -> Counts:
        return sum(self._remote_load.values(), start=self._load.total())

    def rank_times(self) -> list[RankTimes]:
        times = {line.rank: line.times for line in self._all_progress()}  # a host may not have told of its ranks yet
        return [times.get(rank, RankTimes(rank, 0, 0.0, 0.0)) for rank in range(self._num_ranks)]

    def close(self) -> None:
        self._lines.close()
        for channel in self._channels.values():
            channel.close()  # the ranks end
        self._processes.close()

    def _send(self, rank: int, body: bytes) -> None:
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
            self._read(rank)
            raise self._failure(rank) from None

    def _send_to_all(self, body: bytes) -> None:
        """Errors are those of `_send`."""
        for rank in self._channels:
            self._send(rank, body)

    def _send_step(self, rank: int, body: bytes) -> None:
        """Send an encoded message for the thread that runs steps; errors are those of `_send`."""
        if rank not in self._lines.lines:
            self._send(rank, body)
            return
        try:
            self._lines.send(rank, body)
        except BlockingIOError:
            raise self._unread(rank) from None

    def _receive(self, timeout: float) -> Iterator[tuple[int, WorkerReply]]:
        """One message of each rank that has sent something, after waiting for the first one.

        Messages of the store are handled here as well.

        Raises:
            ExecutorFailure: a rank failed, ended, or gives no sign of life.
            ValueError: a rank says that the configuration or the checkpoint is at fault.
        """
        ready = readable(self.watched_fds(), timeout)
        if (now := time.monotonic()) - self._searched >= CHECK_INTERVAL:
            self._searched = now
            for lost in (self._processes.find_silent(), self._lines.find_lost()):
                if lost is not None:
                    raise self._failure(lost)
        for fd in ready:
            if (rank := self._ranks.get(fd)) is not None:
                yield rank, self._read(rank)
            elif (reply := self._lines.receive(rank := self._lines.fds[fd])) is not None:
                yield rank, reply

    def _read(self, rank: int) -> WorkerReply:
        try:
            reply = self._channels[rank].receive(FRAME_TIMEOUT)
        except (EOFError, OSError, TimeoutError, msgspec.MsgspecError):
            raise self._failure(rank) from None
        if isinstance(reply, (RankStarted, RankBeat, RankEnded)):
            self._processes.note_report(rank, reply)
            if isinstance(reply, RankBeat):
                self._remote_progress[rank] = reply.progress
                self._remote_load[rank] = self._load.from_bytes(reply.expert_load)
            elif isinstance(reply, RankEnded):
                raise self._failure(rank)
        elif isinstance(reply, (StoreSet, StoreGet, StoreAdd)):
            for asking, answer in self._store.handle(rank, reply):
                self._send(asking, encode_message(answer))
        elif isinstance(reply, RankFailed):
            if reply.user_error:
                raise ValueError(reply.message)
            raise self._failure(rank, reply)
        return reply

    def _all_progress(self) -> list[RankProgress]:
        return [*self._progress.read(), *self._remote_progress.values()]

    def _at_step(self) -> str:
        return f" at step {self._submitted[0]}" if self._submitted else ""

    def _stall(self) -> str:
        step = self._submitted[0]
        late = late_ranks(self._deployment.grid, self._all_progress(), step)
        names = self._processes.name_ranks(late) or "no rank"
        return (
            f"step {step} is stalled: no rank has finished anything for {self._deployment.step_timeout:g} s; "
            f"did not arrive: {names}"
        )

    def _unread(self, rank: int) -> ExecutorFailure:
        words = f"{self._processes.name_rank(rank)} does not read its plans{self._at_step()}"
        # Between hosts it may be the connection.
        return ExecutorFailure(words, suspicious=rank not in self._lines.lines, stalled_for=FRAME_TIMEOUT)

    def _failure(self, rank: int, error: RankFailed | None = None) -> ExecutorFailure:
        return FailureSearch(self._processes, self._channels).find(rank, error, self._at_step())
