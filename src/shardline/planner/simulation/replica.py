"""One replica in virtual time: the engine's loop around the real scheduler."""

from __future__ import annotations

import functools
import math
from array import array
from collections import deque
from dataclasses import dataclass

import msgspec

from shardline.deployment.deployment import CachePlan, StepLimits
from shardline.messages.request import Request
from shardline.planner.simulation.executor import TOKEN, StepClock, VirtualExecutor
from shardline.planner.simulation.skipping_scheduler import SkippingScheduler
from shardline.planner.simulation.workload import SimulatedRequest
from shardline.sampling_params import SamplingParams


@dataclass(frozen=True)
class ReplicaSetup:
    """What all replicas of a simulation have in common."""

    clock: StepClock
    limits: StepLimits
    cache: CachePlan
    num_blocks: int
    """Block 0, which is never used, included."""
    max_model_len: int
    stages: int
    skips: bool = True
    """Whether equal decode steps are done at once."""
    overlaps_steps: bool = True
    """Whether a step is planned while the one before runs. A CPU's only rank runs each step when it is collected."""

    @property
    def max_in_flight(self) -> int:
        """Steps that are planned and not collected yet."""
        return max(2 if self.overlaps_steps else 1, self.stages)


class Outcome(msgspec.Struct, frozen=True):
    """What became of a replica's requests."""

    times: bytes
    """Four float64 for each request that ended: arrival, first token and last token in virtual seconds, and the length
    of its output."""
    num_failed: int
    """Requests that can never run, because they are too long."""
    kv_use: dict[int, float]
    """Seconds times blocks used, by intervals of equal length."""
    num_steps: int
    num_skipped: int
    """Steps of `num_steps` that were done together with others."""
    num_preemptions: int
    prefix_queries: int
    """Tokens looked up in the prefix cache."""
    prefix_hits: int


@dataclass
class _Live:
    request: SimulatedRequest
    first_token: float = 0.0


class SimulatedReplica:
    """Runs requests until a time, and keeps what became of them."""

    def __init__(self, setup: ReplicaSetup, bucket_seconds: float) -> None:
        """`bucket_seconds` is the resolution of the use of the KV cache over time."""
        self._times = array("d")
        self._num_failed = self._num_steps = self._num_skipped = 0
        self._kv_use: dict[int, float] = {}
        self._setup = setup
        self._bucket = bucket_seconds
        self._executor = VirtualExecutor(setup.clock, setup.num_blocks, setup.stages, setup.max_in_flight)
        self._scheduler = SkippingScheduler(
            setup.limits,
            setup.cache,
            setup.num_blocks,
            setup.max_model_len,
            max_in_flight=setup.max_in_flight,
            stages=setup.stages,
            token=TOKEN,
            skips=setup.skips,
        )
        self._coming: deque[tuple[int, SimulatedRequest]] = deque()
        self._live: dict[str, _Live] = {}
        self._num_tokens = 0

    def outcome(self) -> Outcome:
        """What became of the requests that have ended."""
        stats = self._scheduler.stats()
        return Outcome(
            self._times.tobytes(),
            self._num_failed,
            self._kv_use,
            self._num_steps,
            self._num_skipped,
            stats.num_preemptions,
            stats.prefix_queries,
            stats.prefix_hits,
        )

    @property
    def load(self) -> tuple[int, int]:
        """(requests that have not ended, their tokens), as router policies count them."""
        return len(self._coming) + len(self._live), self._num_tokens

    def add(self, number: int, request: SimulatedRequest) -> None:
        """A request that arrives after all that were added before. `number` is different for each."""
        self._coming.append((number, request))
        self._num_tokens += request.input_len + request.output_len

    def advance(self, until: float = math.inf) -> None:
        """Run all rounds that begin before `until`."""
        executor, scheduler = self._executor, self._scheduler
        while True:
            if not executor.num_flying and not scheduler.has_unfinished:
                if not self._coming or self._coming[0][1].arrival >= until:
                    return
                executor.now = max(executor.now, self._coming[0][1].arrival)
            if executor.now >= until:
                return
            self._admit()
            before = executor.now
            if self._setup.skips:
                limit = min(until, self._coming[0][1].arrival if self._coming else math.inf)
                rounds = scheduler.skip_decodes(functools.partial(executor.skip_decodes, until=limit))
                if rounds:
                    self._num_steps += rounds
                    self._num_skipped += rounds
                    self._note_use(before)
                    continue
            self._run_round()
            self._note_use(before)

    def _admit(self) -> None:
        """Give the scheduler the requests that have arrived."""
        while self._coming and self._coming[0][1].arrival <= self._executor.now:
            number, request = self._coming.popleft()
            self._live[str(number)] = _Live(request)
            self._scheduler.add_request(
                Request(
                    request_id=str(number),
                    prompt_token_ids=request.token_ids(),
                    sampling=_sampling(request.output_len),
                    arrival_time=request.arrival,
                )
            )

    def _run_round(self) -> None:
        """Submit as many steps as may be in flight, and take the results of the oldest one, as the engine does."""
        executor, scheduler = self._executor, self._scheduler
        while executor.num_flying < executor.max_in_flight:
            plan = scheduler.schedule()
            if plan is None:
                break
            executor.submit_step([plan])
            self._num_steps += 1
        if not executor.num_flying:
            outputs = scheduler.take_outputs()
        else:
            (result,) = executor.collect_results()
            outputs = scheduler.update(scheduler.oldest_plan, result)
        for output in outputs:
            live = self._live[output.request_id]
            if output.token_ids and not live.first_token:
                live.first_token = executor.now
            if output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason)

    def _finish(self, request_id: str, reason: str) -> None:
        live = self._live.pop(request_id)
        request = live.request
        self._num_tokens -= request.input_len + request.output_len
        if reason == "error":
            self._num_failed += 1
            return
        # HTTP and the front delay all tokens of a request equally.
        front = self._setup.clock.constants.first
        times = request.arrival, live.first_token + front, self._executor.now + front, request.output_len
        self._times.extend(times)

    def _note_use(self, before: float) -> None:
        """Note the use of the KV cache since `before`, in each interval by its share of the time."""
        now, used, width = self._executor.now, self._scheduler.kv_blocks_used, self._bucket
        for bucket in range(int(before / width), int(now / width) + 1):
            seconds = min(now, (bucket + 1) * width) - max(before, bucket * width)
            if seconds > 0:
                self._kv_use[bucket] = self._kv_use.get(bucket, 0.0) + seconds * used


@functools.lru_cache(maxsize=4096)
def _sampling(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, seed=0)
