"""A way to run a model on GPUs, as the planner compares it, and what it must do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardline.config.engine import EngineConfig
from shardline.config.topology import COORDINATES
from shardline.deployment.length import check_length
from shardline.planner.planned_model import PlannedModel
from shardline.planner.simulation.workload import SimulatedRequest

ENGINES = ("shardline", "vllm")
STARTED_AXES = ("tensor", "pipeline", "data")
"""The axes along which engines start ranks on GPUs."""
HOST_AXES = (*STARTED_AXES, "context")
"""Those along which they start ranks on CPUs."""
HOST_CHOICES = (*(f"{axis}_parallel_size" for axis in HOST_AXES), "enable_expert_parallel")
"""The options that a plan for this host chooses."""
_USUAL_LENGTH = 8192


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and the formats of weights and of the KV cache."""

    engine: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    whole_experts: bool = False
    """Whether each expert is whole on one rank: --enable-expert-parallel."""
    weights: str = "bf16"
    """Label: the checkpoint's type, or the format into which weights are quantized."""
    kv: str = "auto"
    """--kv-cache-dtype"""
    context: int = 1
    """Ranks that share each request's KV cache."""
    numerics: str = "exact"
    """--numerics of this engine."""

    @property
    def num_gpus(self) -> int:
        """One GPU for each rank."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, by its name in `COORDINATES`."""
        return {axis: getattr(self, axis) for axis in COORDINATES}

    def along(self, **sizes: int) -> Layout:
        """The same formats with these sizes, 1 on all other axes, and no whole experts."""
        return replace(self, whole_experts=False, **(dict.fromkeys(COORDINATES, 1) | sizes))  # type: ignore[arg-type]

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage over which whole experts are spread; 1: every rank has a part of each expert."""
        return self.tensor * self.data if self.whole_experts else 1

    @property
    def lockstep(self) -> int:
        """Replicas of which none begins a step before all have ended theirs, because they share experts."""
        return self.data if self.whole_experts else 1

    def __str__(self) -> str:
        words = [self.weights, *(f"{COORDINATES[axis]}{size}" for axis, size in self.sizes.items() if size > 1)]
        words += ["ep"] if self.whole_experts else []
        words += [f"kv:{self.kv}"] if self.kv != "auto" else []
        words += [self.numerics] if self.numerics != "exact" else []
        return " ".join(words if len(words) > 1 else [*words, "tp1"])


@dataclass(frozen=True)
class Demand:
    """What the deployment must do."""

    max_model_len: int
    """Tokens of the longest request, prompt and output."""
    input_len: int = 1024
    output_len: int = 128
    cached_len: int = 0
    """Tokens of input_len at the beginning that prompts share, for which an API has a lower price."""
    concurrency: int = 4
    """Requests of max_model_len that must fit at once to call the memory comfortable."""
    rate: float | None = None
    """Requests per second; None: as many as are running at once."""
    running: int | None = None
    """Requests running at once; None: what fits, or what the rate needs."""
    ttft: float | None = None
    """Longest acceptable time to the first token, in seconds (p90)."""
    tpot: float | None = None
    """Longest acceptable time per output token, in seconds (p90)."""
    utilization: float = 0.9
    """Share of each GPU's memory to use."""
    max_num_seqs: int | None = None
    """None: the engine's default."""
    max_num_batched_tokens: int | None = None
    """None: the engine's default."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further options of the engine that are given: see `planner/options.py`."""
    config: EngineConfig | None = field(default=None, hash=False)
    """The configuration that is planned for this host; None: `options` say what is known of it."""

    @property
    def load_summary(self) -> str:
        """The load of a plan for this host."""
        return f"{self.running} requests of {self.input_len} + {self.output_len} tokens"


def usual_length(positions: int, needed: int) -> int:
    """The longest request of a demand that does not state it: 8,192 tokens, or as many as are `needed`.

    A model with fewer `positions` limits it.
    """
    return min(positions, max(needed, _USUAL_LENGTH))


def demand_for(
    model: PlannedModel,
    options: Mapping[str, Any],
    trace: Sequence[SimulatedRequest] = (),
    *,
    input_len: int | None = None,
    output_len: int | None = None,
    cached_len: int = 0,
    rate: float | None = None,
    **limits: Any,
) -> Demand:
    """The demand of a load and the given `options` of the engine; `limits` are further fields.

    What is not given is taken from the `trace`, if there is one: the mean lengths, the mean rate, and the longest
    request.

    Raises:
        ValueError: a number is out of its range.
    """
    config, longest = EngineConfig.from_options(**options), 0
    if trace:
        input_len = input_len or math.ceil(sum(request.input_len for request in trace) / len(trace))
        output_len = output_len or math.ceil(sum(request.output_len for request in trace) / len(trace))
        seconds = trace[-1].arrival - trace[0].arrival
        rate = rate or ((len(trace) - 1) / seconds if seconds else None)
        longest = max(request.input_len + request.output_len for request in trace)
    input_len, output_len = input_len or Demand.input_len, output_len or Demand.output_len
    if not 0 <= cached_len <= input_len:
        raise ValueError(f"--prefix-len {cached_len} must be from 0 to --input-len {input_len}")
    needed, length = input_len + output_len, config.model.max_model_len
    check_length(length, model.spec)
    if not isinstance(length, int):
        length = usual_length(model.spec.max_position_embeddings, max(needed, longest))
    if needed > length:
        raise ValueError(f"--input-len and --output-len make {needed} tokens, more than --max-model-len {length}")
    return Demand(
        max_model_len=length,
        input_len=input_len,
        output_len=output_len,
        cached_len=cached_len,
        rate=rate,
        utilization=config.cache.gpu_memory_utilization,
        max_num_seqs=options.get("max_num_seqs"),
        max_num_batched_tokens=options.get("max_num_batched_tokens"),
        options=options,
        **limits,
    )
