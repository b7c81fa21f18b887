"""The data-parallel replicas behind one front: which replica runs which request, and what follows if one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from shardline.api.engines import Client, Connect, EngineEvent, EngineRestarted, Engines, RestartFailed
from shardline.api.errors import EngineDead, EngineRecovering, QueueFull
from shardline.api.failover import MAX_FAILURES, RestartLimit, RunningChoice
from shardline.config.engine import EngineConfig
from shardline.engine.ipc import EngineFailed, EngineOutputs
from shardline.router.policies.base import ReplicaLoad
from shardline.router.router import Router
from shardline.stats import EngineStats, merge_stats
from shardline.types import Request, SequenceOutput

logger = logging.getLogger(__name__)


@dataclass
class _Replica:
    client: Client
    restarts: RestartLimit
    in_flight: dict[str, RunningChoice] = field(default_factory=dict)
    tokens: int = 0
    """Prompt tokens and maximal output tokens of the requests in flight."""
    stats: EngineStats = field(default_factory=EngineStats)
    past: EngineStats = field(default_factory=EngineStats)
    """The counters of this replica's engines that have failed."""
    failed: str = ""
    """Why the replica failed; empty while it runs."""
    restarting: bool = False

    def estimate_waiting(self, max_running: int) -> int:
        """About how many of its requests wait: all beyond `max_running`, or as many as it last reported."""
        return max(len(self.in_flight) - max_running, min(self.stats.num_waiting, len(self.in_flight)))

    def load(self, index: int, max_running: int) -> ReplicaLoad:
        """The replica as router policies see it."""
        return ReplicaLoad(len(self.in_flight), self.tokens, index, max_running)

    def take_choices(self) -> list[RunningChoice]:
        """The choices in flight, which are no longer this replica's."""
        choices, self.in_flight, self.tokens = list(self.in_flight.values()), {}, 0
        return choices


class Replicas:
    """One engine client per replica, or per set of replicas in lockstep, used as one engine.

    One thread calls all methods but the constructor. Events come on other threads; the owner must bring them to that
    one thread and pass them to `handle_event`.

    If a replica fails, its choices go on at another one, with the tokens that their users may have seen. Without
    another one they wait until a replica has started again.
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
        self._max_running = self.config.max_running
        self._replicas = [
            _Replica(client, RestartLimit(self.config.parallel.max_restarts)) for client in engines.clients
        ]
        self._router = Router(self.config.parallel.router_policy)
        self._home: dict[str, int] = {}
        self._homeless: dict[str, RunningChoice] = {}
        """Choices that wait for a replica to start again."""

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
        choices = [RunningChoice(child) for child in children]
        if not any(self.alive()):
            if bounded:
                raise EngineRecovering("every replica has failed and is being restarted; try again later")
            self._homeless |= {child.request_id: choice for child, choice in zip(children, choices, strict=True)}
            return
        limit = self.config.scheduler.max_num_waiting
        if bounded and self.num_waiting() >= limit:
            raise QueueFull(f"{limit} requests are already waiting; try again later (--max-num-waiting)")
        self._place_choices(choices)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop engine requests on the replicas that run them. Unknown ids are ignored."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            self._homeless.pop(request_id, None)
            index = self._home.get(request_id)
            if index is not None:
                by_replica.setdefault(index, []).append(request_id)
                self._forget_request(request_id)
        for index, ids in by_replica.items():
            try:
                self._replicas[index].client.abort(ids)
            except OSError:
                continue  # the replica has died, and its requests with it

    def handle_event(self, index: int, event: EngineEvent) -> Sequence[SequenceOutput]:
        """Apply an event of replica `index` and return its outputs.

        Choices that cannot go on anywhere get an output with the finish reason "error".
        """
        replica = self._replicas[index]
        if isinstance(event, EngineOutputs):
            replica.stats = event.stats
            return self._note_outputs(replica, event.outputs)
        if isinstance(event, EngineRestarted):
            return self._welcome_replica(index, event.client)
        if isinstance(event, RestartFailed):
            replica.restarting = False
            return self._recover(index, [])
        return self._lose_replica(index, event)

    def _note_outputs(self, replica: _Replica, outputs: Sequence[SequenceOutput]) -> Sequence[SequenceOutput]:
        """Keep new tokens; returns the outputs as they would be if nothing had failed."""
        corrected = []
        find = replica.in_flight.get
        for output in outputs:
            choice = find(output.request_id)
            if choice is not None:
                choice.token_ids += output.token_ids
                if output.num_cached_tokens != choice.num_cached_tokens:
                    output = choice.correct_output(output)
                if output.finish_reason is not None:
                    self._forget_request(output.request_id)
            corrected.append(output)
        return corrected

    def num_waiting(self) -> int:
        """About how many requests wait, on all living replicas together."""
        return sum(replica.estimate_waiting(self._max_running) for replica in self._replicas if not replica.failed)

    def num_in_flight(self) -> int:
        """Engine requests that have not finished."""
        return len(self._home) + len(self._homeless)

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

    def _place_choices(self, choices: Sequence[RunningChoice]) -> None:
        """Hand choices of one prompt to the living replica that the router policy chooses."""
        loads = [one.load(index, self._max_running) for index, one in enumerate(self._replicas) if not one.failed]
        request = choices[0].request
        index = self._router.choose(request.prompt_token_ids, request.cache_salt, loads)
        replica = self._replicas[index]
        for choice in choices:
            replica.in_flight[choice.request.request_id] = choice
            replica.tokens += _num_tokens(choice.request)
            self._home[choice.request.request_id] = index
        try:
            replica.client.add([choice.as_request() for choice in choices])
        except OSError:
            # The replica has just died. Its EngineFailed will arrive, and `handle_event` will move these requests too.
            return
        except BaseException:  # the requests cannot be sent
            for choice in choices:
                self._forget_request(choice.request.request_id)
            raise

    def _lose_replica(self, index: int, event: EngineFailed) -> Sequence[SequenceOutput]:
        replica, now = self._replicas[index], time.monotonic()
        reason = event.message or "the engine's process has ended"
        replica.failed = reason
        self._router.forget_replica(index)
        gauges = {"num_running": 0, "num_waiting": 0, "kv_blocks_used": 0}
        replica.stats = msgspec.structs.replace(replica.stats, **gauges)
        lost = replica.take_choices()
        logger.error("replica %d is lost with %d choices; %d left: %s", index, len(lost), sum(self.alive()), reason)
        if self.config.parallel.on_failure == "exit":
            for other in self._replicas:
                other.failed = other.failed or reason
                lost += other.take_choices()
        for choice in lost:
            self._home.pop(choice.request.request_id, None)
            choice.note_failure(now, reason, host_lost=event.host_lost)
        return self._recover(index, lost)

    def _recover(self, index: int, lost: Sequence[RunningChoice]) -> Sequence[SequenceOutput]:
        """Restart a failed replica if that is allowed, and find a place for lost choices; returns their errors."""
        replica = self._replicas[index]
        if self.config.parallel.on_failure == "restart":
            replica.restarting = replica.restarts.allow_restart()
            if replica.restarting:
                logger.info("replica %d starts again", index)
                self._engines.restart_engine(index, replica.client)
            else:
                logger.error("replica %d failed too often and stays down", index)
        errors = []
        for choice in lost:
            if len(choice.failures) >= MAX_FAILURES:
                times = f"this request was running at {len(choice.failures)} failures, and is not tried again"
                logger.error("request %s: %s: %s", choice.request.request_id, times, "; ".join(choice.failures))
                errors.append(_as_error(choice, f"{replica.failed} ({times})"))
            elif any(self.alive()):
                self._place_choices([choice])
            else:
                self._homeless[choice.request.request_id] = choice
        if self.dead_reason:
            errors += [_as_error(choice, self.dead_reason) for choice in self._homeless.values()]
            self._homeless = {}
        return errors

    def _welcome_replica(self, index: int, client: Client) -> Sequence[SequenceOutput]:
        replica = self._replicas[index]
        replica.past = merge_stats([replica.past, msgspec.structs.replace(replica.stats, kv_blocks_total=0)])
        replica.stats = EngineStats()
        replica.client, replica.failed, replica.restarting = client, "", False
        waiting, self._homeless = self._homeless, {}
        logger.info("replica %d runs again, and goes on with %d choices", index, len(waiting))
        for choice in waiting.values():
            self._place_choices([choice])
        return []

    def _forget_request(self, request_id: str) -> None:
        index = self._home.pop(request_id, None)
        if index is not None:
            replica = self._replicas[index]
            replica.tokens -= _num_tokens(replica.in_flight.pop(request_id).request)


def _num_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)


def _as_error(choice: RunningChoice, message: str) -> SequenceOutput:
    request = choice.request
    return SequenceOutput(request.request_id, request.choice, [], finish_reason="error", error=message)
