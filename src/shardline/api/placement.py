"""Which replica runs which choice: the choices in flight, and the replicas as the front sees them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shardline.api.chooser import Chooser
from shardline.api.engines import Client
from shardline.api.quarantine import Quarantine, ReplicaState, RunningChoice
from shardline.messages.engine import EngineOutputs
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats
from shardline.routing.policies.base import ReplicaLoad

logger = logging.getLogger(__name__)


class Placement:
    """The choices in flight, each on one of `replicas` or waiting.

    Choices wait if no replica runs, or if only the one in quarantine does. The owner calls `settle` when a replica
    runs again, and after it has let choices wait.
    """

    def __init__(self, replicas: Sequence[Replica], policy: str, max_running: int, caches: bool = True) -> None:
        """`policy`: that of the router. `max_running`: sequences in a step of a replica. `caches`: see `Router`."""
        self.quarantine = Quarantine()
        self._replicas = replicas
        self._max_running = max_running
        self._chooser = Chooser(policy, caches=caches) if len(replicas) > 1 else None
        """None: there is nothing to choose."""
        self._replica_of: dict[str, int] = {}
        self._unplaced: dict[str, RunningChoice] = {}
        """Choices that wait and are no suspects."""

    def __len__(self) -> int:
        """Choices that have not finished."""
        return len(self._replica_of) + self.num_unplaced

    @property
    def num_unplaced(self) -> int:
        """Choices that are on no replica."""
        return len(self._unplaced) + len(self.quarantine.suspects)

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
        open_replicas = self.open_replicas()
        if not open_replicas:
            self._unplaced |= {choice.request.request_id: choice for choice in choices}
        elif self._chooser is None:
            self._send(choices, open_replicas[0])
        else:
            loads = [self._replicas[index].load(index, self._max_running) for index in open_replicas]
            self._send(choices, self._chooser.choose(choices[0], loads, [replica.stats for replica in self._replicas]))

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
        if self._chooser is not None:
            self._chooser.note_outputs(index, event)
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
        if self._chooser is not None:
            self._chooser.lose_replica(index)
        lost = self._replicas[index].take_choices()
        for choice in lost:
            del self._replica_of[choice.request.request_id]
        return lost, self.quarantine.lose_replica(index)

    def forget_prefixes(self, index: int) -> None:
        """Note that nothing is left in the prefix cache of a replica."""
        if self._chooser is not None:
            self._chooser.forget_prefixes(index)

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
        suspect = quarantine.settle(
            [
                ReplicaState(not replica.failed, replica.restarting and not replica.host_lost, len(replica.in_flight))
                for replica in self._replicas
            ]
        )
        if quarantine.replica is not None:
            self._replicas[quarantine.replica].send_away(quarantine.alone)
        if suspect is not None:
            assert quarantine.replica is not None
            name, left = suspect.request.request_id, len(quarantine.suspects)
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
        if self.quarantine.alone is not None:
            self.quarantine.forget_request(request_id)
        self._replicas[self._replica_of.pop(request_id)].drop_choice(request_id)


@dataclass
class Replica:
    """The client of an engine, its choices and its counters."""

    client: Client
    in_flight: dict[str, RunningChoice] = field(default_factory=dict)
    tokens: int = 0
    """Prompt tokens and maximal output tokens of the requests in flight."""
    pending_chunks: int = 0
    """Of the prompts of those of which no output has come."""
    stats: EngineStats = field(default_factory=EngineStats)
    past: EngineStats = field(default_factory=EngineStats)
    """The counters of this replica's engines that have failed."""
    failed: str = ""
    """Why the replica failed; empty while it runs."""
    restarting: bool = False
    host_lost: bool = False
    """It failed with its host, so it may be away for long."""
    leaving: set[str] = field(default_factory=set)
    """Choices that the engine was told to abort, since they are to go on elsewhere."""

    def estimate_waiting(self, max_running: int) -> int:
        """About how many of its requests wait: all beyond `max_running`, or as many as it last reported."""
        return max(len(self.in_flight) - max_running, min(self.stats.num_waiting, len(self.in_flight)))

    def load(self, index: int, max_running: int) -> ReplicaLoad:
        """The replica as router policies see it."""
        return ReplicaLoad(len(self.in_flight), self.tokens, index, max_running, pending_chunks=self.pending_chunks)

    def add_choices(self, choices: Sequence[RunningChoice]) -> None:
        """Hand choices to the engine.

        Raises:
            ValueError: they cannot be sent; none of them was.
        """
        now = time.monotonic()
        for choice in choices:
            choice.sent_at = now
            self.in_flight[choice.request.request_id] = choice
            self.tokens += _num_tokens(choice.request)
            self.pending_chunks += choice.pending_chunks
        # If the replica has just died, its EngineFailed will arrive, and these choices will be moved, too.
        with contextlib.suppress(OSError):
            self.client.add([_request_of(choice) for choice in choices])

    def drop_choice(self, request_id: str) -> RunningChoice:
        """A choice in flight, which is no longer this replica's."""
        choice = self.in_flight.pop(request_id)
        self.tokens -= _num_tokens(choice.request)
        self._note_begun(choice)
        self.leaving.discard(request_id)
        return choice

    def take_choices(self) -> list[RunningChoice]:
        """The choices in flight, which are no longer this replica's."""
        return [self.drop_choice(request_id) for request_id in list(self.in_flight)]

    def send_away(self, stays: RunningChoice | None) -> None:
        """Have the engine give back all choices but one, so that they can go on elsewhere."""
        ids = [name for name, choice in self.in_flight.items() if choice is not stays and name not in self.leaving]
        if ids:
            self.leaving.update(ids)
            with contextlib.suppress(OSError):  # it has just failed
                self.client.abort(ids)

    def note_outputs(self, outputs: Sequence[SequenceOutput]) -> list[SequenceOutput]:
        """Keep new tokens; returns the outputs as they would be if nothing had failed."""
        corrected = []
        find = self.in_flight.get
        for output in outputs:
            choice = find(output.request_id)
            if choice is not None:  # else it was aborted
                choice.token_ids += output.token_ids
                if choice.pending_chunks:
                    self._note_begun(choice)
                if output.num_cached_tokens != choice.num_cached_tokens:
                    if choice.num_cached_tokens is None:
                        choice.num_cached_tokens = output.num_cached_tokens
                    else:
                        output = msgspec.structs.replace(output, num_cached_tokens=choice.num_cached_tokens)
                corrected.append(output)
        return corrected

    def _note_begun(self, choice: RunningChoice) -> None:
        self.pending_chunks -= choice.pending_chunks
        choice.pending_chunks = 0


def _request_of(choice: RunningChoice) -> Request:
    """The request for a replica that goes on after the tokens that are known."""
    if not choice.token_ids:
        return choice.request
    return msgspec.structs.replace(choice.request, output_token_ids=list(choice.token_ids))


def _num_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)


def why_all_failed(replicas: Sequence[Replica]) -> str:
    """Why no replica will run any more; empty while at least one runs or restarts."""
    if any(replica.restarting or not replica.failed for replica in replicas):
        return ""
    return "; ".join(dict.fromkeys(replica.failed for replica in replicas))
