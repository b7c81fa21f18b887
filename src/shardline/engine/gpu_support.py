"""What device cuda cannot do yet, and an estimate of what a GPU has left for the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from shardline.config.engine import EngineConfig
from shardline.config.topology import RankGrid
from shardline.config.units import format_bytes
from shardline.models.partition import Span
from shardline.models.sharding import Numerics
from shardline.models.sizes import step_bytes, weight_bytes
from shardline.models.spec import DecoderSpec, DType, MoE


def check_gpu_support(config: EngineConfig, spec: DecoderSpec) -> None:
    """Refuse what has kernels for the CPU only.

    Raises:
        ValueError: a part of the model or of the configuration has none for GPUs; the message says what would work.
    """
    parallel = config.parallel
    has_experts = any(isinstance(layer.feed_forward, MoE) for layer in spec.layers)
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if has_experts and parallel.enable_expert_parallel and ranks > 1:
        raise ValueError(
            "whole experts on several GPUs (enable_expert_parallel) are not supported yet: the kernels that share "
            "tokens out run on the CPU; leave it out, so that every GPU has a part of each expert"
        )


def gpu_kv_bytes(
    config: EngineConfig,
    spec: DecoderSpec,
    grid: RankGrid,
    stages: tuple[Span, ...],
    dtype: DType,
    gpus: Sequence[tuple[int, int]],
) -> int:
    """What the smallest of `gpus` (bytes in all, bytes free) has left beside the largest rank's weights and a step's
    activations, by formula: enough to refuse what cannot be before it loads, see `kv_budget` for what is measured.

    Raises:
        ValueError: there are fewer GPUs than ranks, or nothing is left.
    """
    numerics = cast(Numerics, config.parallel.numerics)
    ranks = grid.world_size * config.parallel.num_engines
    if len(gpus) < ranks:
        raise ValueError(f"this layout has {ranks} ranks and this host {len(gpus)} GPUs; use fewer, or --device cpu")
    scheme = None if config.model.quantization == "none" else config.model.quantization
    weights = max(
        weight_bytes(spec, grid.place(rank), stages, dtype, numerics, scheme, config.parallel.enable_expert_parallel)
        for rank in range(grid.world_size)
    )
    scheduler, share = config.scheduler, config.cache.gpu_memory_utilization
    activations = step_bytes(spec, dtype, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    left = min(free - int(total * (1.0 - share)) for total, free in gpus) - weights - activations
    if left <= 0:
        raise ValueError(
            f"a GPU has to hold {format_bytes(weights)} of weights and {format_bytes(activations)} of activations "
            "beside the KV cache and cannot; use more GPUs, a smaller --max-num-batched-tokens or a smaller model"
        )
    return left
