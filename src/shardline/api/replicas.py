"""The data-parallel replicas behind one front: which replica runs which request, and what happens if one dies."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from shardline.api.engines import Client, Connect, EngineEvent, Engines
from shardline.api.errors import EngineDead, QueueFull
from shardline.config.engine import EngineConfig
from shardline.engine.ipc import EngineOutputs
from shardline.stats import EngineStats
from shardline.types import Request, SequenceOutput

logger = logging.getLogger(__name__)


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
        """Start all replicas, without waiting for them; see `Engines`.

        Raises:
            ValueError: the configuration is invalid; nothing was started.
        """
        engines = Engines(config, on_event, connect)
        self.config = engines.config
        self.wait_ready = engines.wait_ready
        self.close = engines.close
        self._max_running = self.config.max_running
        self._replicas = [_Replica(client) for client in engines.clients]
        self._home: dict[str, int] = {}

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

    def prepare_grammar(self, grammar: str) -> None:
        """Have all ranks compile a grammar, because a request with it will follow."""
        for replica in self._replicas:
            if not replica.dead:
                with contextlib.suppress(OSError):  # it has just died
                    replica.client.prepare_grammar(grammar)

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

    def _forget_request(self, request_id: str) -> None:
        index = self._home.pop(request_id, None)
        if index is not None:
            replica = self._replicas[index]
            replica.tokens -= _num_tokens(replica.in_flight.pop(request_id))


def _num_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
