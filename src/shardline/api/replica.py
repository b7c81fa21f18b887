"""One replica as the front sees it: its engine, what it runs, and whether it lives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardline.api.engines import Client
from shardline.api.failover import RestartLimit, RunningChoice
from shardline.api.quarantine import ReplicaState
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats
from shardline.routing.policies.base import ReplicaLoad


@dataclass
class Replica:
    """The client of an engine, its choices and its counters."""

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
    host_lost: bool = False
    """It failed with its host, so it may be away for long."""
    leaving: set[str] = field(default_factory=set)
    """Choices that the engine was told to abort, since they are to go on elsewhere."""

    def estimate_waiting(self, max_running: int) -> int:
        """About how many of its requests wait: all beyond `max_running`, or as many as it last reported."""
        return max(len(self.in_flight) - max_running, min(self.stats.num_waiting, len(self.in_flight)))

    def load(self, index: int, max_running: int) -> ReplicaLoad:
        """The replica as router policies see it."""
        return ReplicaLoad(len(self.in_flight), self.tokens, index, max_running)

    def state(self) -> ReplicaState:
        """The replica as the quarantine sees it."""
        return ReplicaState(not self.failed, self.restarting and not self.host_lost, len(self.in_flight))

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
        # If the replica has just died, its EngineFailed will arrive, and these choices will be moved, too.
        with contextlib.suppress(OSError):
            self.client.add([choice.as_request() for choice in choices])

    def drop_choice(self, request_id: str) -> RunningChoice:
        """A choice in flight, which is no longer this replica's."""
        choice = self.in_flight.pop(request_id)
        self.tokens -= _num_tokens(choice.request)
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
                if output.num_cached_tokens != choice.num_cached_tokens:
                    output = choice.correct_output(output)
                corrected.append(output)
        return corrected


def _num_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
