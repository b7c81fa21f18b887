"""The data-parallel replicas behind one front, used as one engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from shardline.api.engines import Connect, EngineEvent, Engines
from shardline.api.errors import EngineDead, EngineRecovering, QueueFull
from shardline.api.failover import Failover
from shardline.api.placement import Placement, Replica, why_all_failed
from shardline.api.quarantine import RunningChoice
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.messages.engine import EngineOutputs
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats, merge_stats
from shardline.messages.worker import RankReport


class Replicas:
    """One engine client per replica, or per set of replicas in lockstep, used as one engine.

    One thread calls all methods but the constructor. Events come on other threads; the owner must bring them to that
    one thread and pass them to `handle_event`.

    If a replica fails, its choices go on at another one; see `Failover`.
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
        self._replicas = [Replica(client) for client in engines.clients]
        parallel, caches = self.config.parallel, self.config.cache.enable_prefix_caching
        self._placement = Placement(self._replicas, parallel.router_policy, self.config.max_running, caches)
        self._failover = Failover(engines, self._replicas, self._placement, self.config.parallel)
        self.abort_requests = self._placement.abort
        self.num_refused = 0
        """Requests for which there was no room among those that wait."""

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
            self.num_refused += 1
            raise QueueFull(f"{limit} requests are already waiting; try again later (--max-num-waiting)")
        self._placement.place([RunningChoice(child, list(child.output_token_ids)) for child in children])

    def reset_prefix_cache(self) -> None:
        """Let later requests find nothing in the prefix caches that is there now."""
        for index, replica in enumerate(self._replicas):
            self._placement.forget_prefixes(index)
            if not replica.failed:
                with contextlib.suppress(OSError):  # it has just failed
                    replica.client.reset_prefix_cache()

    def handle_event(self, index: int, event: EngineEvent) -> Sequence[SequenceOutput]:
        """Apply an event of replica `index` and return its outputs.

        Choices that cannot go on anywhere get an output with the finish reason "error".
        """
        if isinstance(event, EngineOutputs):
            self._replicas[index].stats = event.stats
            return self._placement.note_outputs(index, event)
        return self._failover.handle_event(index, event)

    def num_waiting(self) -> int:
        """About how many requests wait, on all living replicas together, or for one."""
        return self._placement.num_waiting

    def num_in_flight(self) -> int:
        """Engine requests that have not finished."""
        return len(self._placement)

    def stats(self) -> list[EngineStats]:
        """The latest counters of each replica, failed replicas and those in lockstep included."""
        count, found = self.config.parallel.lockstep, []
        for replica in self._replicas:
            summed = merge_stats([replica.past, replica.stats]).each_replica(count)
            for one, now in zip(summed, replica.stats.each_replica(count), strict=True):
                found.append(msgspec.structs.replace(one, experts=now.experts))
        return found

    @property
    def deployment(self) -> Deployment | None:
        """What runs where; None: the engines are not real ones."""
        return self._engines.deployment

    def ranks(self) -> list[list[RankReport]]:
        """For each engine, what its ranks said when they were ready; empty while engines start."""
        return [engine.ranks for engine in self._engines.ready]

    def alive(self) -> list[bool]:
        """For each replica, whether it runs."""
        return [not replica.failed for replica in self._replicas]

    @property
    def dead_reason(self) -> str:
        """Why no replica will run any more; empty while at least one runs or restarts."""
        return why_all_failed(self._replicas)
