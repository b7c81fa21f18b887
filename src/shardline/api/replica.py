"""One replica as the front sees it: its engine and its choices, which another replica can go on with."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from shardline.api.engines import Client
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats
from shardline.routing.policies.base import ReplicaLoad
from shardline.routing.router import CHUNK_TOKENS

SUSPECT_AFTER = 2
"""A choice that was present at so many failures is a suspect, whatever their causes were."""

CLEARED_AFTER = 8
"""Tokens that clear a suspect. Each time that a choice is suspected again, it needs four times as many."""

_PACE_STEPS = 16
"""Over fewer steps, their times say little."""

_DELAY = 0.5
"""Seconds by which the engine may have planned a request later than it was sent."""

ONE_CUT = 15.0
"""Seconds in which all losses of hosts are one failure: a cut takes several replicas away, and some of them again while
it heals."""

RESTART_WINDOW = 300.0
"""Seconds in which a replica may restart --max-restarts times."""


@dataclass(slots=True)
class RunningChoice:
    """A choice that has not finished, with the tokens that its user may have seen already."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Which replicas failed that ran this choice, since it was cleared, and why."""
    is_suspect: bool = False
    """It may be the cause of a failure, so it goes on alone; see `api.quarantine`."""
    clearing_tokens: int = CLEARED_AFTER
    """How many tokens clear it of the next suspicion."""
    cleared_at: int = 0
    """The number of its tokens that clears a suspect."""
    sent_at: float = 0.0
    """When it was last sent to a replica."""
    pending_chunks: int = 0
    """Chunks of its prompt that are still to be computed, as the router counts them."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the first replica found in its cache; None: no output has come."""
    host_lost_at: float = -math.inf
    """When the last failure was counted whose cause was the loss of a host."""

    def note_failure(
        self, replica: int, now: float, why: str, *, host_lost: bool = False, suspicious: bool = False
    ) -> None:
        """The replica has failed at the time `now`.

        `host_lost`: a host of it is away. `suspicious`: what ran may be the cause, and this choice ran.
        """
        if host_lost:
            if now - self.host_lost_at < ONE_CUT:
                return
            self.host_lost_at = now
        self.failures.append((replica, why))
        if not self.is_suspect and (suspicious or len(self.failures) >= SUSPECT_AFTER):
            self.is_suspect = True
            self.cleared_at = len(self.token_ids) + self.clearing_tokens
            self.clearing_tokens *= 4

    def try_to_clear(self) -> bool:
        """Whether it is no suspect any more: it has got on beyond the place where it was suspected."""
        if self.is_suspect and len(self.token_ids) >= self.cleared_at:
            self.is_suspect = False
            self.failures.clear()
        return not self.is_suspect

    def correct_output(self, output: SequenceOutput) -> SequenceOutput:
        """The output with the number of cached tokens that it would have if nothing had failed."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
            return output
        return msgspec.structs.replace(output, num_cached_tokens=self.num_cached_tokens)

    def as_request(self) -> Request:
        """The request for a replica that goes on after the tokens that are known."""
        if not self.token_ids:
            return self.request
        return msgspec.structs.replace(self.request, output_token_ids=list(self.token_ids))


def ran_at(choices: Sequence[RunningChoice], stalled_at: float) -> list[RunningChoice]:
    """The choices that the engine may have been running when it last got on, at the time `stalled_at`.

    An engine that has nothing to do plans a request at once. One that has stalled plans none that comes later.
    """
    last = max(stalled_at, min((choice.sent_at for choice in choices), default=0.0)) + _DELAY
    return [choice for choice in choices if choice.sent_at <= last]


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


@dataclass
class Replica:
    """The client of an engine, its choices and its counters."""

    client: Client
    restarts: RestartLimit
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
    _paced: EngineStats = field(default_factory=EngineStats)
    """The counters when `take_pace` last looked."""

    def estimate_waiting(self, max_running: int) -> int:
        """About how many of its requests wait: all beyond `max_running`, or as many as it last reported."""
        return max(len(self.in_flight) - max_running, min(self.stats.num_waiting, len(self.in_flight)))

    def load(self, index: int, max_running: int) -> ReplicaLoad:
        """The replica as router policies see it."""
        return ReplicaLoad(len(self.in_flight), self.tokens, index, max_running, pending_chunks=self.pending_chunks)

    def take_pace(self) -> tuple[int, float, float] | None:
        """The steps since the last look, chunks of prompts in them, and their seconds; None: they are few."""
        now, before = self.stats, self._paced
        steps = now.num_steps - before.num_steps
        if 0 <= steps < _PACE_STEPS:
            return None
        self._paced = now
        if steps < 0:
            return None  # another engine counts
        prompts, hits = now.prompt_tokens - before.prompt_tokens, now.prefix_hits - before.prefix_hits
        return steps, max(0, prompts - hits) / CHUNK_TOKENS, now.step_seconds - before.step_seconds

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
            self.pending_chunks += choice.pending_chunks
        # If the replica has just died, its EngineFailed will arrive, and these choices will be moved, too.
        with contextlib.suppress(OSError):
            self.client.add([choice.as_request() for choice in choices])

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
                    output = choice.correct_output(output)
                corrected.append(output)
        return corrected

    def _note_begun(self, choice: RunningChoice) -> None:
        self.pending_chunks -= choice.pending_chunks
        choice.pending_chunks = 0


def _num_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)


class ReplicaState(NamedTuple):
    """What the choice of a replica depends on."""

    runs: bool
    is_starting: bool
    """It does not run, but will soon."""
    num_choices: int
    """Choices on it."""
