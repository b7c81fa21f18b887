"""One replica in virtual time: the engine's loop around the real scheduler, and an executor that computes nothing."""

from __future__ import annotations

import functools
import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardline.deployment.deployment import CachePlan, KVAllocation, StepLimits
from shardline.engine.executor.base import Executor
from shardline.messages.control import Control
from shardline.messages.request import Request
from shardline.messages.step import SequenceResult, StepPlan, StepResult
from shardline.messages.worker import RankReport
from shardline.models.step_work import StepWork
from shardline.planner.cluster import Cluster
from shardline.planner.simulation.skipping_scheduler import SkippingScheduler
from shardline.planner.simulation.workload import SimulatedRequest
from shardline.planner.timing import Constants, step_load
from shardline.sampling_params import SamplingParams
from shardline.segment.expert_load import Counts

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class StepClock:
    """Times of the steps of one replica, or of one of its pipeline stages."""

    work: StepWork
    cluster: Cluster
    constants: Constants
    _without_context: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)
    """For each number of sequences: seconds of a decode step without attention, and ideal ones to read states."""

    def plan_seconds(self, plan: StepPlan) -> float:
        """Time of a planned step. A sequence with one token decodes; the others compute chunks of prompts."""
        num_seqs = context = prompt_tokens = pairs = 0
        for step in plan.steps:
            if step.num_tokens == 1:
                num_seqs += 1
                context += step.start + 1
            else:
                prompt_tokens += step.num_tokens
                pairs += step.num_tokens * (2 * step.start + step.num_tokens)
        if not prompt_tokens:
            return float(self.decode_seconds(num_seqs, np.array([context / max(1, num_seqs)]))[0])
        load = step_load(
            self.work,
            self.cluster,
            num_seqs,
            context / max(1, num_seqs),
            prompt_tokens,
            pairs / prompt_tokens / 2,
        )
        return load.seconds(self.constants)

    def decode_seconds(self, num_seqs: int, contexts: Vector) -> Vector:
        """Times of steps in which `num_seqs` sequences decode; `contexts` has their mean length in each step."""
        if num_seqs not in self._without_context:
            load = step_load(self.work, self.cluster, num_seqs, 0.0, 0.0, 0.0)
            self._without_context[num_seqs] = load._replace(cache=0.0).seconds(self.constants), load.cache
        others, states = self._without_context[num_seqs]
        gpu = self.cluster.slowest
        bandwidth, rate = gpu.bandwidth_gbs * 1e9, gpu.flops_per_second(self.work.plain)
        reads, computes = np.full(len(contexts), states), np.zeros(len(contexts))
        for layer in self.work.attention:
            seen = contexts if layer.window is None else np.minimum(contexts, layer.window)
            reads += num_seqs * layer.bytes_per_token / bandwidth * seen
            computes += num_seqs * layer.decode_flops / rate * seen
        return np.asarray(others + np.maximum(reads, computes) / self.constants.cache)


TOKEN = 0
"""Every sampled token. It ends no sequence, so that outputs have the lengths that requests ask for."""


class VirtualExecutor(Executor):
    """The ranks of one replica. Steps pass its pipeline stages one after the other."""

    def __init__(self, clock: StepClock, num_blocks: int, stages: int, max_in_flight: int) -> None:
        self.allocation = KVAllocation(num_blocks)
        self.max_in_flight = max_in_flight
        self.now = 0.0
        """Virtual seconds."""
        self._clock = clock
        self._free = [0.0] * stages
        """When each stage has done what it was given."""
        self._flying: deque[tuple[float, StepResult]] = deque()

    def start(self) -> list[RankReport]:
        return []

    @property
    def num_flying(self) -> int:
        return len(self._flying)

    def submit_step(self, plans: Sequence[StepPlan]) -> None:
        """Begin a step when the stages are free."""
        (plan,) = plans
        seconds = self._clock.plan_seconds(plan)
        end = self.now
        for stage, free in enumerate(self._free):
            end = max(end, free) + seconds
            self._free[stage] = end
        results = [SequenceResult(step.seq_id, [TOKEN]) for step in plan.steps if step.sample]
        self._flying.append((end, StepResult(plan.step_id, results, seconds)))

    def collect_results(self) -> list[StepResult]:
        """Move the clock to the end of the oldest step."""
        self.now, result = self._flying.popleft()
        return [result]

    def skip_decodes(self, num_seqs: int, context: int, most: int, until: float) -> int:
        """Do up to `most` rounds at once, each of which submits a decode step and collects the oldest one.

        One step is in flight, in which `num_seqs` sequences decode, with `context` tokens together. Returns how many
        rounds there were: all of them begin before `until`, except perhaps the first.
        """
        (first_end, flying) = self._flying.popleft()
        contexts = context / num_seqs + np.arange(1, most + 1, dtype=np.float64)
        ends = np.full(most + 1, first_end)
        ends[1:] += np.cumsum(self._clock.decode_seconds(num_seqs, contexts))
        rounds = min(most, 1 + int(np.searchsorted(ends, until)))
        self.now = float(ends[rounds - 1])
        self._free = [float(ends[rounds])]
        last = StepResult(flying.step_id + rounds, flying.results, float(ends[rounds] - ends[rounds - 1]))
        self._flying.append((self._free[0], last))
        return rounds

    def submit_control(self, control: Control) -> None:
        """No rank has to be told anything."""

    def expert_load(self) -> Counts:
        return np.empty((0, 0), dtype=np.int64)

    def close(self) -> None:
        """Nothing has to be ended."""


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
    pending_chunks: int
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
        self._coming: deque[tuple[int, SimulatedRequest, int]] = deque()
        self._live: dict[str, _Live] = {}
        self._num_tokens = self._pending_chunks = 0

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
    def load(self) -> tuple[int, int, int]:
        """(requests that have not ended, their tokens, chunks before their first tokens), as policies count them."""
        return len(self._coming) + len(self._live), self._num_tokens, self._pending_chunks

    def add(self, number: int, request: SimulatedRequest, pending_chunks: int = 0) -> None:
        """A request that arrives after all that were added before. `number` is different for each.

        `pending_chunks`: what its router expects to be computed before its first token.
        """
        self._coming.append((number, request, pending_chunks))
        self._num_tokens += request.input_len + request.output_len
        self._pending_chunks += pending_chunks

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
            number, request, pending_chunks = self._coming.popleft()
            self._live[str(number)] = _Live(request, pending_chunks)
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
                self._pending_chunks -= live.pending_chunks
                live.pending_chunks = 0
            if output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason)

    def _finish(self, request_id: str, reason: str) -> None:
        live = self._live.pop(request_id)
        request = live.request
        self._num_tokens -= request.input_len + request.output_len
        self._pending_chunks -= live.pending_chunks
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
