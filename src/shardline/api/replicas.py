"""The data-parallel replicas behind one front: which replica runs which request, and what follows if one fails."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from shardline.api.engines import Client, Connect, EngineEvent, EngineRestarted, Engines, RestartFailed
from shardline.api.replica import Replica, ReplicaState, RestartLimit, RunningChoice, ran_at
from shardline.api.requests import EngineDead, EngineRecovering, QueueFull
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.messages.engine import EngineFailed, EngineOutputs
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats, merge_stats
from shardline.messages.worker import RankReport
from shardline.routing.router import Router

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
        if any(replica.restarting or not replica.failed for replica in self._replicas):
            return ""
        return "; ".join(dict.fromkeys(replica.failed for replica in self._replicas))

    def _lose_replica(self, index: int, event: EngineFailed) -> Sequence[SequenceOutput]:
        replica, now = self._replicas[index], time.monotonic()
        reason = event.message or "the engine's process has ended"
        replica.failed, replica.host_lost = reason, event.host_lost
        replica.stats = replica.stats.with_gauges(num_running=0, num_waiting=0, kv_blocks_used=0)
        lost, alone = self._placement.lose_replica(index)
        logger.error("replica %d is lost with %d choices; %d left: %s", index, len(lost), sum(self.alive()), reason)
        if self.config.parallel.on_failure == "exit":
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
            errors += [_as_error(choice, self.dead_reason) for choice in self._placement.take_unplaced()]
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


def _as_error(choice: RunningChoice, message: str) -> SequenceOutput:
    request = choice.request
    return SequenceOutput(request.request_id, request.choice, [], finish_reason="error", error=message)


class Placement:
    """The choices in flight, each on one of `replicas` or waiting.

    Choices wait if no replica runs, or if only the one in quarantine does. The owner calls `settle` when a replica
    runs again, and after it has let choices wait.
    """

    def __init__(self, replicas: Sequence[Replica], policy: str, max_running: int) -> None:
        """`policy`: that of the router. `max_running`: sequences in a step of a replica."""
        self.quarantine = Quarantine()
        self._replicas = replicas
        self._max_running = max_running
        self._router = Router(policy)
        self._replica_of: dict[str, int] = {}
        self._unplaced: dict[str, RunningChoice] = {}
        """Choices that wait and are no suspects."""

    def __len__(self) -> int:
        """Choices that have not finished."""
        return len(self._replica_of) + self.num_unplaced

    @property
    def num_unplaced(self) -> int:
        """Choices that are on no replica."""
        return len(self._unplaced) + len(self.quarantine)

    @property
    def num_waiting(self) -> int:
        """About how many choices wait, on all living replicas together, or for one."""
        living = (replica for replica in self._replicas if not replica.failed)
        return self.num_unplaced + sum(replica.estimate_waiting(self._max_running) for replica in living)

    def open_replicas(self) -> list[int]:
        """Those that run, and take choices that are no suspects."""
        closed = self.quarantine.replica
        return [index for index, replica in enumerate(self._replicas) if not replica.failed and index != closed]

    def place(self, choices: Sequence[RunningChoice]) -> None:
        """Hand choices of one prompt to the open replica that the router policy chooses. Without one, they wait.

        Raises:
            ValueError: they cannot be sent; none of them was.
        """
        loads = [self._replicas[index].load(index, self._max_running) for index in self.open_replicas()]
        if not loads:
            self._unplaced |= {choice.request.request_id: choice for choice in choices}
            return
        for load in loads:
            if (pace := self._replicas[load.number].take_pace()) is not None:
                self._router.paces.add(load.number, *pace)
        request = choices[0].request
        decision = self._router.decide(request.prompt_token_ids, request.cache_salt, loads)
        choices[0].pending_chunks = decision.cost
        self._send(choices, decision.number)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop choices where they are. Unknown ids are ignored."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            self._unplaced.pop(request_id, None)
            self.quarantine.forget_request(request_id)
            index = self._replica_of.pop(request_id, None)
            if index is not None:
                by_replica.setdefault(index, []).append(request_id)
                self._replicas[index].drop_choice(request_id)
        for index, ids in by_replica.items():
            try:
                self._replicas[index].client.abort(ids)
            except OSError:
                continue  # the replica has died, and its requests with it
        self.settle()

    def note_outputs(self, index: int, event: EngineOutputs) -> Sequence[SequenceOutput]:
        """Keep new tokens of a replica; returns the outputs as they would be if nothing had failed."""
        replica = self._replicas[index]
        if event.kv_events:
            self._router.kv.apply(index, 0, event.kv_events)
        outputs = replica.note_outputs(event.outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._end(output.request_id)
        for request_id in replica.leaving.intersection(event.aborted):
            del self._replica_of[request_id]
            self._unplaced[request_id] = replica.drop_choice(request_id)
        self.settle()
        return outputs

    def lose_replica(self, index: int) -> tuple[list[RunningChoice], RunningChoice | None]:
        """The choices of a replica that is lost, which are now nowhere, and the one of them that was alone on it."""
        self._router.forget_replica(index)
        self._router.kv.forget(index)
        lost = self._replicas[index].take_choices()
        for choice in lost:
            del self._replica_of[choice.request.request_id]
        return lost, self.quarantine.lose_replica(index)

    def forget_prefixes(self, index: int) -> None:
        """Note that nothing is left in the prefix cache of a replica."""
        self._router.forget_replica(index)

    def let_wait(self, choices: Sequence[RunningChoice]) -> None:
        """Let choices wait that are nowhere."""
        for choice in choices:
            if choice.is_suspect:
                self.quarantine.add(choice)
            else:
                self._unplaced[choice.request.request_id] = choice

    def take_unplaced(self) -> list[RunningChoice]:
        """The choices that wait, which are now nowhere."""
        unplaced, self._unplaced = [*self._unplaced.values(), *self.quarantine.take_all()], {}
        return unplaced

    def settle(self) -> None:
        """Do what the quarantine asks for, and place the choices that wait for an open replica."""
        quarantine = self.quarantine
        if quarantine.replica is None and not self.num_unplaced:
            return
        suspect = quarantine.settle([replica.state() for replica in self._replicas])
        if quarantine.replica is not None:
            self._replicas[quarantine.replica].send_away(quarantine.alone)
        if suspect is not None:
            assert quarantine.replica is not None
            name, left = suspect.request.request_id, len(quarantine)
            logger.info("request %s goes on alone at replica %d; %d wait for that", name, quarantine.replica, left)
            self._send([suspect], quarantine.replica)
        if self._unplaced and self.open_replicas():
            waiting, self._unplaced = self._unplaced, {}
            for choice in waiting.values():
                self.place([choice])

    def _send(self, choices: Sequence[RunningChoice], index: int) -> None:
        self._replica_of |= {choice.request.request_id: index for choice in choices}
        try:
            self._replicas[index].add_choices(choices)
        except BaseException:  # the requests cannot be sent
            for choice in choices:
                self._end(choice.request.request_id)
            raise

    def _end(self, request_id: str) -> None:
        self.quarantine.forget_request(request_id)
        self._replicas[self._replica_of.pop(request_id)].drop_choice(request_id)


class Quarantine:
    """The suspects, and the replica that is kept free for them.

    The owner calls `settle` after every change, and does what it asks for. Nothing may be sent to `replica` but what
    `settle` returns, and all choices on it but `alone` must leave.
    """

    def __init__(self) -> None:
        self.replica: int | None = None
        """The replica in quarantine; None: there is none."""
        self.alone: RunningChoice | None = None
        """The suspect that runs there."""
        self._suspects: dict[str, RunningChoice] = {}
        """Those that wait for their turn, in their order."""

    def __len__(self) -> int:
        """How many suspects wait for their turn."""
        return len(self._suspects)

    def add(self, choice: RunningChoice) -> None:
        """Let a suspect wait for its turn. It must not be on any replica."""
        self._suspects[choice.request.request_id] = choice

    def take_all(self) -> list[RunningChoice]:
        """The suspects that wait, which do so no longer."""
        taken = list(self._suspects.values())
        self._suspects.clear()
        return taken

    def forget_request(self, request_id: str) -> None:
        """Note that a choice has ended. Others are ignored."""
        self._suspects.pop(request_id, None)
        if self.alone is not None and self.alone.request.request_id == request_id:
            self.alone = None

    def lose_replica(self, index: int) -> RunningChoice | None:
        """Note that a replica is lost; returns the suspect that was alone on it."""
        if index != self.replica:
            return None
        lost, self.replica, self.alone = self.alone, None, None
        return lost

    def settle(self, replicas: Sequence[ReplicaState]) -> RunningChoice | None:
        """Clear the suspect that has got on, choose a replica, and return the suspect that must now be sent to it."""
        if self.alone is not None:
            if not self.alone.try_to_clear():
                return None
            self.alone = None
        if not self._suspects:
            self.replica = None
            return None
        if self.replica is None:
            self.replica = _choose_replica(replicas)
        if self.replica is None or replicas[self.replica].num_choices:
            return None
        self.alone = self._suspects.pop(next(iter(self._suspects)))
        return self.alone


def _choose_replica(replicas: Sequence[ReplicaState]) -> int | None:
    """One that is empty while another one serves everybody else. If none can become so soon, the emptiest one."""
    running = [index for index, replica in enumerate(replicas) if replica.runs]
    best = min(running, key=lambda index: replicas[index].num_choices, default=None)
    if best is None or not any(replica.is_starting for replica in replicas):
        return best
    return best if len(running) > 1 and not replicas[best].num_choices else None
