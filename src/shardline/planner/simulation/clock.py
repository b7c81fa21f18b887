"""How long a step takes, by the planner's formula."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardline.messages.step import StepPlan
from shardline.models.step_work import StepWork
from shardline.planner.cluster import Cluster
from shardline.planner.constants import Constants
from shardline.planner.timing import step_load

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
        for one in self.work.attention:
            seen = contexts if one.window is None else np.minimum(contexts, one.window)
            reads += num_seqs * one.bytes_per_token / bandwidth * seen
            computes += num_seqs * one.decode_flops / rate * seen
        return np.asarray(others + np.maximum(reads, computes) / self.constants.cache)
