"""The data-parallel replicas behind one front: which replica runs which request, and what happens if one dies."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from shardline.api.errors import EngineDead, QueueFull
from shardline.config.engine import EngineConfig
from shardline.engine.ipc import EngineFailed, EngineOutputs, EngineReady
from shardline.types import EngineStats, Request, SequenceOutput

logger = logging.getLogger(__name__)

EngineEvent = EngineOutputs | EngineFailed

_POLL_SECONDS = 0.2


class Client(Protocol):
    """The handle on one replica; the real one is shardline.engine.client.EngineClient."""

    def wait_ready(self, timeout: float | None = None) -> EngineReady: ...
    def add(self, requests: Sequence[Request]) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def close(self, timeout: float = 10.0) -> None: ...


Connect = Callable[[EngineConfig, int, Callable[[EngineEvent], None]], Client]
"""Starts the replica with this number, and calls the callable with its events, on a thread of its own."""


@dataclass
class _Replica:
    client: Client
    in_flight: dict[str, Request] = field(default_factory=dict)
    tokens: int = 0
    """Prompt tokens and maximal output tokens of the requests in flight."""
    stats: EngineStats = field(default_factory=EngineStats)
    dead: str = ""
    """Why the replica died; empty while it lives."""

    def estimate_waiting(self, max_running: int) -> int:
        """About how many of its requests wait: all beyond `max_running`, or as many as it last reported."""
        return max(len(self.in_flight) - max_running, min(self.stats.num_waiting, len(self.in_flight)))


class Replicas:
    """One engine client per replica, or per set of replicas in lockstep, used as one engine.

    One thread calls all methods but the constructor. Events come on other threads; the owner must bring them to that
    one thread and pass them to `handle_event`.
    """

    def __init__(
        self, config: EngineConfig, on_event: Callable[[int, EngineEvent], None], connect: Connect | None = None
    ) -> None:
        """Start all replicas, without waiting for them.

        If `connect` is None, the configuration is resolved first, and the replicas are real engines.

        Raises:
            ValueError: the configuration is invalid; nothing was started.
        """
        if connect is None:
            connect, config = _deploy(config)
        self.config = config
        self._max_running = config.max_running
        self._replicas: list[_Replica] = []
        self._open: list[_Replica] = []
        self._closing = threading.Lock()
        self._home: dict[str, int] = {}
        try:
            for index in range(config.parallel.num_engines):
                replica = _Replica(connect(config, index, partial(on_event, index)))
                self._replicas.append(replica)
                self._open.append(replica)
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> list[EngineReady]:
        """Block until every replica is ready; may run on another thread, before any other method is called.

        Raises:
            ValueError: the configuration is at fault.
            RuntimeError: a replica failed, or the replicas would give different answers.
        """
        with ThreadPoolExecutor(len(self._replicas), "wait-ready") as pool:
            waits = [pool.submit(self._wait_ready, replica.client) for replica in self._replicas]
            try:
                done, _ = wait(waits, return_when=FIRST_EXCEPTION)
            except BaseException:  # ctrl-C: closing the clients also ends the threads that wait for them
                self.close()
                raise
            failed = [error for error in (future.exception() for future in done) if error is not None]
            if failed:
                self.close()
        if failed:
            raise next((error for error in failed if isinstance(error, ValueError)), failed[0])
        ready = [future.result() for future in waits]
        if len({one.fingerprint for one in ready}) > 1:
            self.close()
            prints = ", ".join(f"replica {index}: {one.fingerprint}" for index, one in enumerate(ready))
            raise RuntimeError(f"the replicas would give different answers ({prints})")
        return ready

    def add_requests(self, children: Sequence[Request], *, bounded: bool = True) -> None:
        """Run all choices of one user request on the replica with the least load.

        Raises:
            QueueFull: `max_num_waiting` requests are waiting (only if `bounded`).
            EngineDead: no replica is left.
        """
        alive = [index for index, replica in enumerate(self._replicas) if not replica.dead]
        if not alive:
            raise EngineDead(self.dead_reason)
        limit = self.config.scheduler.max_num_waiting
        if bounded and self.num_waiting() >= limit:
            raise QueueFull(f"{limit} requests are already waiting; try again later (--max-num-waiting)")
        index = min(alive, key=lambda i: (len(self._replicas[i].in_flight), self._replicas[i].tokens, i))
        replica = self._replicas[index]
        for child in children:
            replica.in_flight[child.request_id] = child
            replica.tokens += _num_tokens(child)
            self._home[child.request_id] = index
        try:
            replica.client.add(children)
        except OSError:
            # The replica has just died. Its EngineFailed will arrive, and `handle_event` will fail these requests too.
            return
        except BaseException:  # the requests cannot be sent
            for child in children:
                self._forget_request(child.request_id)
            raise

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop engine requests on the replicas that run them. Unknown ids are ignored."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
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

        If the replica has died, each of its requests gets an output with the finish reason "error".
        """
        replica = self._replicas[index]
        if isinstance(event, EngineOutputs):
            replica.stats = event.stats
            for output in event.outputs:
                if output.finish_reason is not None:
                    self._forget_request(output.request_id)
            return event.outputs
        replica.dead = event.message or "the engine's process has ended"
        gauges = {"num_running": 0, "num_waiting": 0, "kv_blocks_used": 0}
        replica.stats = msgspec.structs.replace(replica.stats, **gauges)
        lost = list(replica.in_flight.values())
        for child in lost:
            self._forget_request(child.request_id)
        left = sum(self.alive())
        logger.error("replica %d is lost, %d of its choices too; %d left: %s", index, len(lost), left, replica.dead)
        return [
            SequenceOutput(child.request_id, child.choice, [], finish_reason="error", error=replica.dead)
            for child in lost
        ]

    def num_waiting(self) -> int:
        """About how many requests wait, on all living replicas together."""
        return sum(replica.estimate_waiting(self._max_running) for replica in self._replicas if not replica.dead)

    def num_in_flight(self) -> int:
        """Engine requests that have not finished."""
        return len(self._home)

    def stats(self) -> list[EngineStats]:
        """The latest counters of each replica, dead replicas included."""
        return [replica.stats for replica in self._replicas]

    def alive(self) -> list[bool]:
        """For each replica, whether it lives."""
        return [not replica.dead for replica in self._replicas]

    @property
    def dead_reason(self) -> str:
        """Why no replica is left; empty while at least one lives."""
        reasons = [replica.dead for replica in self._replicas]
        return "; ".join(dict.fromkeys(reasons)) if reasons and all(reasons) else ""

    def close(self) -> None:
        """End the processes of all replicas; may be called again, and from any thread."""
        with self._closing:
            replicas, self._open = self._open, []
            if replicas:
                with ThreadPoolExecutor(len(replicas), "close") as pool:
                    list(pool.map(lambda replica: replica.client.close(), replicas))

    def _wait_ready(self, client: Client) -> EngineReady:
        # Waits are short, since a client that is closed meanwhile may never answer.
        while self._open:
            with contextlib.suppress(TimeoutError):
                return client.wait_ready(_POLL_SECONDS)
        raise RuntimeError("the engine was closed while it started")

    def _forget_request(self, request_id: str) -> None:
        index = self._home.pop(request_id, None)
        if index is not None:
            replica = self._replicas[index]
            replica.tokens -= _num_tokens(replica.in_flight.pop(request_id))


def _deploy(config: EngineConfig) -> tuple[Connect, EngineConfig]:
    """What starts the engines of a deployment, and the configuration with its model named by the folder that was found.

    Raises:
        ValueError: the configuration cannot be.
    """
    from shardline.deployment.here import resolve_here
    from shardline.engine.client import EngineClient

    deployment = resolve_here(config)

    def connect(config: EngineConfig, index: int, on_event: Callable[[EngineEvent], None]) -> Client:
        return EngineClient(deployment, index, on_event)

    found = dataclasses.replace(config.model, model=deployment.model.folder)
    return connect, dataclasses.replace(config, model=found)


def merge_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """The sums of the counters and gauges of several replicas."""
    names = set(EngineStats.__struct_fields__) - {"experts"}  # expert loads of different engines have no sum
    return EngineStats(**{name: sum(getattr(one, name) for one in stats) for name in names})


def _num_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
