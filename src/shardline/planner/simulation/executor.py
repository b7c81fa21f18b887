"""An executor that computes nothing: steps take the time that the formula gives them, on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardline.deployment.deployment import KVAllocation
from shardline.engine.executor.base import Executor
from shardline.messages.control import Control
from shardline.messages.step import SequenceResult, StepPlan, StepResult
from shardline.messages.worker import RankReport
from shardline.models.step_work import StepWork
from shardline.planner.cluster import Cluster
from shardline.planner.constants import Constants
from shardline.planner.timing import step_load
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
        """Nothing has to be loaded."""
        return []

    @property
    def num_flying(self) -> int:
        """Steps in flight."""
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
        """No expert is counted."""
        return np.empty((0, 0), dtype=np.int64)

    def close(self) -> None:
        """Nothing has to be ended."""
