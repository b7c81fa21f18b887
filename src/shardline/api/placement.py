"""Which replica has which choice, and which choices wait for one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shardline.api.failover import RunningChoice
from shardline.api.quarantine import Quarantine
from shardline.api.replica import Replica
from shardline.messages.engine import EngineOutputs
from shardline.messages.request import SequenceOutput
from shardline.routing.router import Router

_log = logging.getLogger(__name__)


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
        self._home: dict[str, int] = {}
        self._homeless: dict[str, RunningChoice] = {}
        """Choices that wait and are no suspects."""

    def __len__(self) -> int:
        """Choices that have not finished."""
        return len(self._home) + self.num_homeless

    @property
    def num_homeless(self) -> int:
        """Choices that are on no replica."""
        return len(self._homeless) + len(self.quarantine)

    @property
    def num_waiting(self) -> int:
        """About how many choices wait, on all living replicas together, or for one."""
        living = (replica for replica in self._replicas if not replica.failed)
        return self.num_homeless + sum(replica.estimate_waiting(self._max_running) for replica in living)

    def open_replicas(self) -> list[int]:
        """Those that run, and take choices that are no suspects."""
        closed = self.quarantine.replica
        return [index for index, one in enumerate(self._replicas) if not one.failed and index != closed]

    def place(self, choices: Sequence[RunningChoice]) -> None:
        """Hand choices of one prompt to the open replica that the router policy chooses. Without one, they wait.

        Raises:
            ValueError: they cannot be sent; none of them was.
        """
        loads = [self._replicas[index].load(index, self._max_running) for index in self.open_replicas()]
        if not loads:
            self._homeless |= {choice.request.request_id: choice for choice in choices}
            return
        request = choices[0].request
        self._send(choices, self._router.choose(request.prompt_token_ids, request.cache_salt, loads))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop choices where they are. Unknown ids are ignored."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            self._homeless.pop(request_id, None)
            self.quarantine.forget_request(request_id)
            index = self._home.pop(request_id, None)
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
        outputs = replica.note_outputs(event.outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._end(output.request_id)
        for request_id in replica.leaving.intersection(event.aborted):
            del self._home[request_id]
            self._homeless[request_id] = replica.drop_choice(request_id)
        self.settle()
        return outputs

    def lose_replica(self, index: int) -> tuple[list[RunningChoice], RunningChoice | None]:
        """The choices of a replica that is lost, which are now nowhere, and the one of them that was alone on it."""
        self._router.forget_replica(index)
        lost = self._replicas[index].take_choices()
        for choice in lost:
            del self._home[choice.request.request_id]
        return lost, self.quarantine.lose_replica(index)

    def let_wait(self, choices: Sequence[RunningChoice]) -> None:
        """Let choices wait that are nowhere."""
        for choice in choices:
            if choice.is_suspect:
                self.quarantine.add(choice)
            else:
                self._homeless[choice.request.request_id] = choice

    def take_homeless(self) -> list[RunningChoice]:
        """The choices that wait, which are now nowhere."""
        homeless, self._homeless = [*self._homeless.values(), *self.quarantine.take_all()], {}
        return homeless

    def settle(self) -> None:
        """Do what the quarantine asks for, and place the choices that wait for an open replica."""
        quarantine = self.quarantine
        if quarantine.replica is None and not self.num_homeless:
            return
        suspect = quarantine.settle([replica.state() for replica in self._replicas])
        if quarantine.replica is not None:
            self._replicas[quarantine.replica].send_away(quarantine.alone)
        if suspect is not None:
            assert quarantine.replica is not None
            name, left = suspect.request.request_id, len(quarantine)
            _log.info("request %s goes on alone at replica %d; %d wait for that", name, quarantine.replica, left)
            self._send([suspect], quarantine.replica)
        if self._homeless and self.open_replicas():
            waiting, self._homeless = self._homeless, {}
            for choice in waiting.values():
                self.place([choice])

    def _send(self, choices: Sequence[RunningChoice], index: int) -> None:
        self._home |= {choice.request.request_id: index for choice in choices}
        try:
            self._replicas[index].add_choices(choices)
        except BaseException:  # the requests cannot be sent
            for choice in choices:
                self._end(choice.request.request_id)
            raise

    def _end(self, request_id: str) -> None:
        self.quarantine.forget_request(request_id)
        self._replicas[self._home.pop(request_id)].drop_choice(request_id)
