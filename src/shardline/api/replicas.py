"""The data-parallel replicas behind one front: which replica runs which request, and what follows if one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from shardline.api.engines import Client, Connect, EngineEvent, EngineRestarted, Engines, RestartFailed
from shardline.api.errors import EngineDead, EngineRecovering, QueueFull
from shardline.api.failover import RestartLimit, RunningChoice, ran_at
from shardline.api.placement import Placement
from shardline.api.replica import Replica
from shardline.config.engine import EngineConfig
from shardline.messages.engine import EngineFailed, EngineOutputs
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats, merge_stats

_CULPRIT = "this request was running at an earlier failure, and alone at this one; it is not tried again"

logger = logging.getLogger(__name__)


class Replicas:
    """One engine client per replica, or per set of replicas in lockstep, used as one engine.

    One thread calls all methods but the constructor. Events come on other threads; the owner must bring them to that
    one thread and pass them to `handle_event`.

    If a replica fails, its choices go on at another one, with the tokens that their users may have seen. Without
    another one they wait until a replica has started again. Those that may have caused the failure go on alone.
    """

    def __init__(
        self, config: EngineConfig, on_event: Callable[[int, EngineEvent], None], connect: Connect | None = None
    ) -> None:
        """Start all replicas, without waiting for them; see `Engines`.

        Raises:
            ValueError: the configuration is invalid; nothing was started.
        """
        self._engines = engines = Engines(config, on_event, connect)
        self.config = engines.config
        self.wait_ready = engines.wait_ready
        limit = self.config.parallel.max_restarts
        self._replicas = [Replica(client, RestartLimit(limit)) for client in engines.clients]
        self._placement = Placement(self._replicas, self.config.parallel.router_policy, self.config.max_running)
        self.abort_requests = self._placement.abort

    def close(self) -> None:
        """End all replicas, and other nodes with exit code 1 if no replica is left; any thread may call this."""
        self._engines.close(1 if self.dead_reason else 0)

    def add_requests(self, children: Sequence[Request], *, bounded: bool = True) -> None:
        """Run all choices of one user request on the replica that the router policy chooses.

        Raises:
            QueueFull: `max_num_waiting` requests are waiting (only if `bounded`).
            EngineRecovering: no replica runs at present (only if `bounded`; otherwise the request waits for one).
            EngineDead: no replica is left.
        """
        if self.dead_reason:
            raise EngineDead(self.dead_reason)
        if bounded and not any(self.alive()):
            raise EngineRecovering("every replica has failed and is being restarted; try again later")
        limit = self.config.scheduler.max_num_waiting
        if bounded and self.num_waiting() >= limit:
            raise QueueFull(f"{limit} requests are already waiting; try again later (--max-num-waiting)")
        self._placement.place([RunningChoice(child) for child in children])

    def handle_event(self, index: int, event: EngineEvent) -> Sequence[SequenceOutput]:
        """Apply an event of replica `index` and return its outputs.

        Choices that cannot go on anywhere get an output with the finish reason "error".
        """
        replica = self._replicas[index]
        if isinstance(event, EngineOutputs):
            replica.stats = event.stats
            return self._placement.note_outputs(index, event)
        if isinstance(event, EngineRestarted):
            return self._welcome_replica(index, event.client)
        if isinstance(event, RestartFailed):
            replica.restarting = False
            return self._recover(index, [])
        return self._lose_replica(index, event)

    def num_waiting(self) -> int:
        """About how many requests wait, on all living replicas together, or for one."""
        return self._placement.num_waiting

    def num_in_flight(self) -> int:
        """Engine requests that have not finished."""
        return len(self._placement)

    def stats(self) -> list[EngineStats]:
        """The latest counters of each replica, failed replicas included."""
        return [
            msgspec.structs.replace(merge_stats([replica.past, replica.stats]), experts=replica.stats.experts)
            for replica in self._replicas
        ]

    def alive(self) -> list[bool]:
        """For each replica, whether it runs."""
        return [not replica.failed for replica in self._replicas]

    @property
    def dead_reason(self) -> str:
        """Why no replica will run any more; empty while at least one runs or restarts."""
        if any(replica.restarting or not replica.failed for replica in self._replicas):
            return ""
        return "; ".join(dict.fromkeys(replica.failed for replica in self._replicas))

    def _lose_replica(self, index: int, event: EngineFailed) -> Sequence[SequenceOutput]:
        replica, now = self._replicas[index], time.monotonic()
        reason = event.message or "the engine's process has ended"
        replica.failed, replica.host_lost = reason, event.host_lost
        gauges = {"num_running": 0, "num_waiting": 0, "kv_blocks_used": 0}
        replica.stats = msgspec.structs.replace(replica.stats, **gauges)
        lost, alone = self._placement.lose_replica(index)
        logger.error("replica %d is lost with %d choices; %d left: %s", index, len(lost), sum(self.alive()), reason)
        if self.config.parallel.on_failure == "exit":
            for other, one in enumerate(self._replicas):
                one.failed = one.failed or reason
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
        if self.config.parallel.on_failure == "restart":
            # A failure that a request was shown to cause says nothing about the replica.
            replica.restarting = culprit is not None or replica.restarts.allow_restart()
            if replica.restarting:
                logger.info("replica %d starts again", index)
                self._engines.restart_engine(index, replica.client)
            else:
                logger.error("replica %d failed too often and stays down", index)
        errors = []
        if culprit is not None:
            for home, _ in culprit.failures[:-1]:
                self._replicas[home].restarts.forgive()
            name, why = culprit.request.request_id, "; ".join(reason for _, reason in culprit.failures)
            logger.error("request %s: %s: %s", name, _CULPRIT, why)
            errors.append(_as_error(culprit, f"{replica.failed} ({_CULPRIT})"))
        waiting = [choice for choice in lost if choice is not culprit]
        self._placement.let_wait(waiting)
        if self.dead_reason:
            errors += [_as_error(choice, self.dead_reason) for choice in self._placement.take_homeless()]
        elif suspects := sum(choice.is_suspect for choice in waiting):
            logger.warning("%d choices may have ended replica %d, and go on alone, one by one", suspects, index)
        self._placement.settle()
        return errors

    def _welcome_replica(self, index: int, client: Client) -> Sequence[SequenceOutput]:
        replica = self._replicas[index]
        replica.past = merge_stats([replica.past, msgspec.structs.replace(replica.stats, kv_blocks_total=0)])
        replica.stats = EngineStats()
        replica.client, replica.failed, replica.restarting = client, "", False
        logger.info("replica %d runs again, and goes on with %d choices", index, self._placement.num_homeless)
        self._placement.settle()
        return []


def _as_error(choice: RunningChoice, message: str) -> SequenceOutput:
    request = choice.request
    return SequenceOutput(request.request_id, request.choice, [], finish_reason="error", error=message)
