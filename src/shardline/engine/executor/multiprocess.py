"""One process per rank; plans go over a channel each, tensors over the transport of each group of ranks."""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from shardline.channel import Channel, encode_message
from shardline.deployment.deployment import Deployment, KVAllocation
from shardline.deployment.kv_budget import agree_allocation, fixed_allocation
from shardline.deployment.messages import (
    AllocateCache,
    MemoryUse,
    PrepareGrammar,
    Probe,
    ProbeDone,
    RankBeat,
    RankEnded,
    RankFailed,
    RankMeasured,
    RankReady,
    RankReport,
    RankStarted,
    RunStep,
    StepDone,
    StoreGet,
    StoreSet,
    StoreValue,
    WorkerReply,
)
from shardline.deployment.segment import segment_layout
from shardline.engine.executor.base import Executor, ExecutorFailure
from shardline.engine.executor.rank_processes import RankProcesses
from shardline.engine.watchdog import Verdict, Watchdog, probe_interval
from shardline.segment.expert_load import Counts
from shardline.segment.progress import RankProgress, late_ranks
from shardline.segment.pulse import CHECK_INTERVAL, note_work
from shardline.types import StepPlan, StepResult, rank_steps

_FRAME_TIMEOUT = 10.0
"""Seconds without a byte after which a rank in the middle of a frame counts as gone."""

_LOADING_NOTICE = 30.0
"""Seconds of loading after which the log names the ranks that are not ready, again and again."""

_log = logging.getLogger(__name__)


class MultiprocessExecutor(Executor):
    """Starts the ranks, watches their pipes, and names the one that dies, is late or does not answer."""

    def __init__(self, deployment: Deployment, engine: int, streams: Mapping[int, int]) -> None:
        """`streams`: for each rank on another host, the descriptor of the socket that leads to it."""
        self._deployment = deployment
        self.max_in_flight = deployment.max_in_flight
        self._replica_size = deployment.grid.replica_size
        self._processes = RankProcesses(deployment, engine, streams, _FRAME_TIMEOUT)
        self._channels: list[Channel[WorkerReply]] = []
        self._submitted: list[int] = []
        self._results: list[deque[StepResult]] = [deque() for _ in deployment.grid.drivers]
        interval = probe_interval(deployment.step_timeout)
        self._watchdog = Watchdog(interval, deployment.step_timeout - interval)
        self._probe_number = 0
        self._unanswered: set[int] = set()
        """Ranks that have not answered the last probe."""
        self._store: dict[str, bytes] = {}
        self._awaiting: dict[str, list[int]] = {}
        """For each key that the store lacks, the ranks that have asked for it."""
        layout = segment_layout(deployment, engine, deployment.placements[engine][0].host)
        self._progress = layout.progress(self._processes.segment)
        self._remote_progress: dict[int, RankProgress] = {}
        self._remote_load: dict[int, Counts] = {}
        self._load = layout.expert_load(self._processes.segment)

    def start(self) -> list[RankReport]:
        for rank in range(self._deployment.grid.world_size):
            self._channels.append(self._processes.start_rank(rank))
        if (fixed := fixed_allocation(self._deployment)) is not None:
            self._allocate(fixed)
        reports: dict[int, RankReport] = {}
        measured: dict[int, MemoryUse] = {}
        noticed = time.monotonic()
        while len(reports) < len(self._channels):
            waiting = [rank for rank in range(len(self._channels)) if rank not in reports]
            if time.monotonic() - noticed >= _LOADING_NOTICE:
                noticed = time.monotonic()
                _log.info("still loading: %s", self._processes.name_ranks(waiting))
            for rank in self._readable(range(len(self._channels)), CHECK_INTERVAL):
                reply = self._receive(rank)
                if isinstance(reply, RankReady):
                    reports[rank] = reply.report
                elif isinstance(reply, RankMeasured):
                    measured[rank] = reply.memory
                    if len(measured) == len(self._channels):
                        self._allocate(agree_allocation(self._deployment, [measured[r] for r in sorted(measured)]))
        self._processes.remove_store()
        return [reports[rank] for rank in sorted(reports)]

    def _allocate(self, allocation: KVAllocation) -> None:
        self.allocation = allocation
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(AllocateCache(allocation))
            except OSError:
                self._receive(rank)  # raises its last words, if there are any
                raise ExecutorFailure(self._death(rank)) from None

    def submit_step(self, plans: Sequence[StepPlan]) -> None:
        messages = [encode_message(RunStep(step)) for step in rank_steps(plans)]
        self._submitted.append(plans[0].step_id)
        for rank in range(len(self._channels)):
            self._send(rank, messages[rank // self._replica_size])

    def prepare_grammar(self, grammar: str) -> None:
        body = encode_message(PrepareGrammar(grammar))
        for rank in range(len(self._channels)):
            self._send(rank, body)

    def _send(self, rank: int, body: bytes) -> None:
        try:
            self._channels[rank].send_encoded(body)
        except BlockingIOError:
            raise ExecutorFailure(
                f"{self._processes.name_rank(rank)} does not read its plans{self._at_step()}"
            ) from None
        except OSError:
            # It is gone, but its last words, if there are any, have not been read.
            self._receive(rank)
            raise ExecutorFailure(self._death(rank)) from None

    def collect_results(self) -> list[StepResult]:
        last_progress, work = time.monotonic(), self._processes.work
        while not all(self._results):
            for rank in self._readable(range(len(self._channels)), CHECK_INTERVAL):
                reply = self._receive(rank)
                if isinstance(reply, StepDone):
                    self._results[rank // self._replica_size].append(reply.result)
            if (now_done := self._processes.work) != work:
                last_progress, work = time.monotonic(), now_done
                note_work()  # for the front, which watches this process
            elif time.monotonic() - last_progress >= self._deployment.step_timeout and not all(self._results):
                raise ExecutorFailure(self._stall())
        self._submitted.pop(0)
        self._watchdog.note_life()
        return [results.popleft() for results in self._results]

    def watched_fds(self) -> list[int]:
        return [channel.fileno() for channel in self._channels]

    def check_ranks(self) -> float:
        for rank in self._readable(range(len(self._channels)), 0.0):
            reply = self._receive(rank)
            if isinstance(reply, ProbeDone) and reply.number == self._probe_number:
                self._unanswered.discard(rank)
                if not self._unanswered:
                    self._watchdog.note_life()
        verdict = self._watchdog.check()
        if verdict is Verdict.PROBE:
            self._probe_ranks()
        elif verdict is Verdict.LOST:
            names = " ".join(self._processes.name_rank(rank) for rank in sorted(self._unanswered))
            raise ExecutorFailure(f"{names} did not answer a probe within {self._watchdog.patience:g} s while idle")
        return min(CHECK_INTERVAL, self._watchdog.seconds_to_check())

    def _probe_ranks(self) -> None:
        self._probe_number += 1
        self._unanswered = set(range(len(self._channels)))
        body = encode_message(Probe(self._probe_number))
        for rank in sorted(self._unanswered):
            self._send(rank, body)

    def expert_load(self) -> Counts:
        return sum(self._remote_load.values(), start=self._load.total())

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._processes.close()

    def kill(self) -> None:
        self._processes.kill()

    def _readable(self, ranks: range | list[int], timeout: float) -> list[int]:
        """The ranks that have sent something.

        Raises:
            ExecutorFailure: a rank gives no sign of life.
        """
        fds = {self._channels[rank].fileno(): rank for rank in ranks}
        ready, _, _ = select.select(list(fds), [], [], timeout)
        if (silent := self._processes.find_silent()) is not None:
            raise ExecutorFailure(self._death(silent))
        return [fds[fd] for fd in ready]

    def _receive(self, rank: int) -> WorkerReply:
        """The next message of a rank. Those that concern no step are handled here too.

        Raises:
            ExecutorFailure: the rank failed or ended.
            ValueError: the rank says that the configuration or the checkpoint is at fault.
        """
        try:
            reply = self._channels[rank].receive(_FRAME_TIMEOUT)
        except (EOFError, OSError, TimeoutError, msgspec.MsgspecError):
            raise ExecutorFailure(self._death(rank)) from None
        if isinstance(reply, (RankStarted, RankBeat, RankEnded)):
            self._note_report(rank, reply)
        elif isinstance(reply, StoreSet):
            self._store[reply.key] = reply.value
            for asking in self._awaiting.pop(reply.key, []):
                self._send(asking, encode_message(StoreValue(reply.key, reply.value)))
        elif isinstance(reply, StoreGet):
            if (value := self._store.get(reply.key)) is None:
                self._awaiting.setdefault(reply.key, []).append(rank)
            else:
                self._send(rank, encode_message(StoreValue(reply.key, value)))
        if isinstance(reply, RankFailed):
            if reply.user_error:
                raise ValueError(reply.message)
            if reply.consequence and (crashed := self._processes.find_crashed(rank, self._channels)) is not None:
                # The rank only noticed that the other one has died.
                raise ExecutorFailure(self._death(crashed))
            raise ExecutorFailure(f"{self._processes.name_rank(rank)} failed{self._at_step()}: {reply.message}")
        return reply

    def _at_step(self) -> str:
        return f" at step {self._submitted[0]}" if self._submitted else ""

    def _death(self, rank: int) -> str:
        return self._processes.describe_end(rank) + self._at_step()

    def _note_report(self, rank: int, report: RankStarted | RankBeat | RankEnded) -> None:
        """Handle what a node says of a rank on another host."""
        self._processes.note_report(rank, report)
        if isinstance(report, RankEnded):
            raise ExecutorFailure(self._death(rank))
        if isinstance(report, RankBeat):
            self._remote_progress[rank] = report.progress
            self._remote_load[rank] = self._load.from_bytes(report.expert_load)

    def _stall(self) -> str:
        step = self._submitted[0]
        progress = [*self._progress.read(), *self._remote_progress.values()]
        late = late_ranks(self._deployment.grid, progress, step)
        names = self._processes.name_ranks(late) or "no rank"
        return (
            f"step {step} is stalled: no rank has finished anything for {self._deployment.step_timeout:g} s; "
            f"did not arrive: {names}"
        )
