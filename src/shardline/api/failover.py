"""What follows if a replica fails: it restarts, and its choices go on elsewhere, or wait."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from shardline.api.engines import Client, EngineRestarted, Engines, RestartFailed
from shardline.api.placement import Placement, Replica, why_all_failed
from shardline.api.quarantine import RunningChoice
from shardline.config.parallel import ParallelConfig
from shardline.messages.engine import EngineFailed
from shardline.messages.request import SequenceOutput
from shardline.messages.stats import EngineStats, merge_stats

RESTART_WINDOW = 300.0
"""Seconds in which a replica may restart --max-restarts times."""

_DELAY = 0.5
"""Seconds by which the engine may have planned a request later than it was sent."""
_CULPRIT = "this request was running at an earlier failure, and alone at this one; it is not tried again"
logger = logging.getLogger(__name__)


class Failover:
    """Restarts replicas, and finds places for the choices of those that fail.

    Choices go on with the tokens that their users may have seen. Without another replica they wait until one has
    started again. Those that may have caused the failure go on alone.
    """

    def __init__(
        self, engines: Engines, replicas: Sequence[Replica], placement: Placement, parallel: ParallelConfig
    ) -> None:
        self._engines = engines
        self._replicas = replicas
        self._placement = placement
        self._parallel = parallel
        self._restarts = [RestartLimit(parallel.max_restarts) for _ in replicas]

    def handle_event(
        self, index: int, event: EngineFailed | EngineRestarted | RestartFailed
    ) -> Sequence[SequenceOutput]:
        """Apply an event of replica `index`.

        Returns:
            For choices that cannot go on anywhere, outputs with the finish reason "error".
        """
        if isinstance(event, EngineRestarted):
            return self._welcome_replica(index, event.client)
        if isinstance(event, RestartFailed):
            self._replicas[index].restarting = False
            return self._recover(index, [])
        return self._lose_replica(index, event)

    def _lose_replica(self, index: int, event: EngineFailed) -> Sequence[SequenceOutput]:
        replica, now = self._replicas[index], time.monotonic()
        reason = event.message or "the engine's process has ended"
        replica.failed, replica.host_lost = reason, event.host_lost
        replica.stats = replica.stats.with_gauges(num_running=0, num_waiting=0, kv_blocks_used=0)
        lost, alone = self._placement.lose_replica(index)
        left = sum(not other.failed for other in self._replicas)
        logger.error("replica %d is lost with %d choices; %d left: %s", index, len(lost), left, reason)
        if self._parallel.on_failure == "exit":
            for other, other_replica in enumerate(self._replicas):
                other_replica.failed = other_replica.failed or reason
                lost += self._placement.lose_replica(other)[0]
        ran = ran_at(lost, now - event.stalled_for) if event.suspicious else []
        suspicious = {choice.request.request_id for choice in ran}
        for choice in lost:
            ran_here = choice.request.request_id in suspicious
            choice.note_failure(index, now, reason, host_lost=event.host_lost, suspicious=ran_here)
        return self._recover(index, lost, None if event.host_lost else alone)

    def _recover(
        self, index: int, lost: Sequence[RunningChoice], culprit: RunningChoice | None = None
    ) -> Sequence[SequenceOutput]:
        """Restart a failed replica if that is allowed, and find a place for lost choices; returns their errors.

        `culprit`: the choice that was alone, so it has caused the failure.
        """
        replica = self._replicas[index]
        if self._parallel.on_failure == "restart":
            # A failure that a request was shown to cause says nothing about the replica.
            replica.restarting = culprit is not None or self._restarts[index].allow_restart()
            if replica.restarting:
                logger.info("replica %d starts again", index)
                self._engines.restart_engine(index, replica.client)
            else:
                logger.error("replica %d failed too often and stays down", index)
        errors = []
        if culprit is not None:
            for home, _ in culprit.failures[:-1]:
                self._restarts[home].forgive()
            name, why = culprit.request.request_id, "; ".join(reason for _, reason in culprit.failures)
            logger.error("request %s: %s: %s", name, _CULPRIT, why)
            errors.append(_as_error(culprit, f"{replica.failed} ({_CULPRIT})"))
        waiting = [choice for choice in lost if choice is not culprit]
        self._placement.let_wait(waiting)
        if dead_reason := why_all_failed(self._replicas):
            errors += [_as_error(choice, dead_reason) for choice in self._placement.take_unplaced()]
        elif suspects := sum(choice.is_suspect for choice in waiting):
            logger.warning("%d choices may have ended replica %d, and go on alone, one by one", suspects, index)
        self._placement.settle()
        return errors

    def _welcome_replica(self, index: int, client: Client) -> Sequence[SequenceOutput]:
        replica = self._replicas[index]
        replica.past = merge_stats([replica.past, replica.stats.with_gauges(kv_blocks_total=0)])
        replica.stats = EngineStats()
        replica.client, replica.failed, replica.restarting = client, "", False
        logger.info("replica %d runs again, and goes on with %d choices", index, self._placement.num_unplaced)
        self._placement.settle()
        return []


class RestartLimit:
    """Says whether a replica may restart once more."""

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: restarts within RESTART_WINDOW."""
        self._max_restarts = max_restarts
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
        if len(self._times) >= self._max_restarts:
            return False
        self._times.append(now)
        return True


def ran_at(choices: Sequence[RunningChoice], stalled_at: float) -> list[RunningChoice]:
    """The choices that the engine may have been running when it last got on, at the time `stalled_at`.

    An engine that has nothing to do plans a request at once. One that has stalled plans none that comes later.
    """
    last = max(stalled_at, min((choice.sent_at for choice in choices), default=0.0)) + _DELAY
    return [choice for choice in choices if choice.sent_at <= last]


def _as_error(choice: RunningChoice, message: str) -> SequenceOutput:
    request = choice.request
    return SequenceOutput(request.request_id, [], finish_reason="error", error=message)
