"""What GPUs have left for the KV cache: by formula before anything is loaded, then by what every rank has measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from shardline.config.engine import EngineConfig
from shardline.config.topology import RankGrid
from shardline.config.units import format_bytes
from shardline.models.kv_capacity import longest_request
from shardline.models.partition import Span
from shardline.models.sharding import Numerics
from shardline.models.sizes import step_bytes, weight_bytes
from shardline.models.spec import DecoderSpec, DType
from shardline.runtime.messages import MemoryUse
from shardline.runtime.setup import ReplicaSetup, pool_blocks


def agreed_blocks(setup: ReplicaSetup, measured: Sequence[MemoryUse]) -> int:
    """Blocks of the pool, the null block included: what fits the rank that has room for the fewest.

    Raises:
        ValueError: one request of max_model_len tokens does not fit; the message says which would.
    """
    cache, scheduler = setup.config.cache, setup.config.scheduler
    share = cache.gpu_memory_utilization
    rooms = [max(0, memory.room(share)) for memory in measured]
    num_blocks = pool_blocks(setup.config, setup.spec, setup.grid, setup.stages, setup.max_model_len, rooms)
    length = setup.max_model_len
    fits = longest_request(
        setup.groups, max(0, num_blocks - 1), cache.block_size, scheduler.max_num_batched_tokens, length
    )
    if fits >= length:
        return num_blocks
    rank = min(range(len(measured)), key=lambda rank: measured[rank].room(share))
    smaller = f"lower --max-model-len to {fits}, or " if fits >= 2 else ""
    raise ValueError(
        f"one request of {length} tokens does not fit the KV cache of rank {rank}: {explain(measured[rank], share)}; "
        f"{smaller}lower --max-num-batched-tokens ({scheduler.max_num_batched_tokens}) or --max-num-seqs "
        f"({scheduler.max_num_seqs}), raise --gpu-memory-utilization, or use more GPUs"
    )


def explain(memory: MemoryUse, share: float) -> str:
    """The sum, in words."""
    parts = (
        (memory.others, "driver and others"),
        (memory.weights, "weights"),
        (memory.step, "the largest step"),
        (memory.graphs, "graphs"),
    )
    taken = "".join(f" - {format_bytes(size)} ({what})" for size, what in parts)
    return f"{share:g} x {format_bytes(memory.total)}{taken} = {format_bytes(memory.room(share))} for the KV cache"


def gpu_kv_bytes(
    config: EngineConfig,
    spec: DecoderSpec,
    grid: RankGrid,
    stages: tuple[Span, ...],
    dtype: DType,
    gpus: Sequence[tuple[int, int]],
) -> int:
    """What the smallest of `gpus` (bytes in all, bytes free) has left beside the largest rank's weights and a step's
    activations, by formula: enough to refuse before it loads what cannot be. Ranks that share
    a GPU share its memory.

    Raises:
        ValueError: there are fewer GPUs than ranks, or nothing is left.
    """
    numerics = cast(Numerics, config.parallel.numerics)
    ranks = grid.world_size * config.parallel.num_engines
    if len(gpus) < ranks and config.parallel.collectives != "gloo":
        raise ValueError(
            f"this layout has {ranks} ranks and this host {len(gpus)} GPUs; use fewer, or --device cpu, or, for tests "
            "only, --collectives gloo, with which ranks may share a GPU"
        )
    sharing = -(-ranks // len(gpus))
    scheme = None if config.model.quantization == "none" else config.model.quantization
    weights = max(
        weight_bytes(spec, grid.place(rank), stages, dtype, numerics, scheme, config.parallel.enable_expert_parallel)
        for rank in range(grid.world_size)
    )
    scheduler, share = config.scheduler, config.cache.gpu_memory_utilization
    activations = step_bytes(spec, dtype, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    left = min(free - int(total * (1.0 - share)) for total, free in gpus) // sharing - weights - activations
    if left <= 0:
        raise ValueError(
            f"a GPU has to hold {format_bytes(weights)} of weights and {format_bytes(activations)} of activations "
            "beside the KV cache and cannot; use more GPUs, a smaller --max-num-batched-tokens or a smaller model"
        )
    return left
