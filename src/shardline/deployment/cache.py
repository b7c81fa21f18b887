"""The paged KV cache of a deployment: its groups, its blocks, and the longest request that it holds."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardline.config.engine import CacheConfig, EngineConfig
from shardline.config.fields import format_bytes
from shardline.deployment.deployment import NO_TIER, CachePlan, FixedPool, MeasuredPool, RankWeights, TierPlan
from shardline.deployment.kv_budget import (
    check_host_memory,
    default_host_blocks,
    fitting_blocks,
    is_measured,
    useful_blocks,
)
from shardline.deployment.layout import Layout
from shardline.deployment.length import choose_length
from shardline.deployment.machine import Machine
from shardline.models.kv_groups import kv_groups
from shardline.models.partition import Span
from shardline.models.parts import DTYPE_BYTES, DType, KVDType
from shardline.models.sizes import kv_block_bytes
from shardline.models.spec import DecoderSpec

BLOCK_TOKENS = 16
"""Blocks hold a multiple of this many tokens: the CPU's own products of attention take so many keys at once. One rule
serves all kernels."""

_FOLDER_SHARE = 10
"""Files of blocks may take so many times the host memory of a replica, unless the user says."""

_STREAM_BYTES = 4096
"""A CPU reads memory at full speed in contiguous pieces of this size or more."""

_MOST_BLOCK_TOKENS = {1: 64, 2: 32, 4: 32}
"""By bytes of an element. Larger blocks waste memory and share fewer prefixes. Bytes have the most to gain: the scales
of a block are further pieces that memory has to find."""


def choose_block_size(asked: int | None, spec: DecoderSpec, dtype: DType, kv_dtype: KVDType, device: str) -> int:
    """The number of tokens in a block. Smaller blocks than there are here become the smallest that hold whole ones.

    Raises:
        ValueError: the block size, or the model's head dim, does not allow the order in which products read pages.
    """
    if asked is not None and asked > 0 and BLOCK_TOKENS % asked == 0:
        asked = BLOCK_TOKENS
    if asked is not None and (asked < 1 or asked % BLOCK_TOKENS):
        raise ValueError(
            f"--block-size {asked} is not a multiple of {BLOCK_TOKENS}, as blocks are with all kernels; "
            f"{BLOCK_TOKENS} and {2 * BLOCK_TOKENS} would work"
        )
    dims = [layer.attention.key_dim for layer in set(spec.layers) if layer.attention.key_dim]
    for dim in dims:
        if dim % 2 and device == "cpu" and dtype == "bfloat16":
            raise ValueError(f"keys of {dim} elements: on a CPU, bf16 needs an even number; --dtype float32 would work")
    if asked is not None:
        return asked
    return streamed_block_size(min(dims), DTYPE_BYTES[kv_dtype]) if dims and device == "cpu" else BLOCK_TOKENS


def streamed_block_size(dim: int, element_bytes: int) -> int:
    """The number of tokens in a block that a CPU reads fast, for keys of `dim` elements in a head."""
    size = BLOCK_TOKENS
    while size < _MOST_BLOCK_TOKENS[element_bytes] and size * dim * element_bytes < _STREAM_BYTES:
        size *= 2
    return size


def plan_cache(
    config: EngineConfig,
    layout: Layout,
    machine: Machine,
    spec: DecoderSpec,
    stages: Sequence[Span],
    weights: Sequence[RankWeights],
    dtype: KVDType,
    room: int,
    beside: Sequence[int] = (),
) -> tuple[CachePlan, int]:
    """Plan the KV cache for ranks that have `room` bytes each; returns the plan and max_model_len in tokens. `beside`:
    bytes on each rank that a second model keeps beside each block.

    Raises:
        ValueError: one request of the requested length does not fit, or the host's memory cannot hold a pool of the
            requested size.
    """
    asked, block_size, groups = config.cache, config.cache.block_size, kv_groups(spec)
    assert block_size is not None, "it is chosen before"
    grid = layout.grid
    is_shared = layout.device == "cpu" and not layout.splits_tensor_groups and grid.context == 1
    of_replica = tuple(
        kv_block_bytes(spec, groups, grid.place(rank), stages, dtype, block_size, latents_shared=is_shared)
        for rank in range(grid.replica_size)
    )
    block_bytes = of_replica * grid.data
    whole_bytes = tuple(map(sum, zip(block_bytes, beside, strict=True))) if beside else block_bytes

    def num_blocks(length: int) -> int:
        if asked.num_gpu_blocks_override is not None:
            return (-(-asked.num_gpu_blocks_override // grid.context) + 1) * grid.context
        most = useful_blocks(config, groups, length, grid.context)
        if layout.device == "cpu" and asked.kv_cache_memory is None:
            of_replica_whole = sum(whole_bytes) // grid.data
            most = min(most, default_host_blocks(config, groups, length, of_replica_whole, grid.context))
        return fitting_blocks([room] * len(whole_bytes), whole_bytes, most, grid.context)

    asked_length = config.model.max_model_len
    wanted = asked_length if isinstance(asked_length, int) else spec.max_position_embeddings
    length = choose_length(config, groups, wanted, num_blocks(wanted), grid.context)
    estimated = num_blocks(length)
    tier = plan_tier(asked, of_replica, grid.context)
    check_host_memory(layout, machine, weights, whole_bytes, estimated, block_bytes, tier.num_slots)
    plan = CachePlan(
        dtype=dtype,
        groups=groups,
        block_size=block_size,
        max_blocks=-(-length // block_size) + 1,
        prefix_caching=asked.enable_prefix_caching,
        latents_shared=is_shared,
        block_bytes=block_bytes,
        useful_blocks=useful_blocks(config, groups, length, grid.context),
        # If the ranks measure, the estimate was only needed for early refusals.
        pool=MeasuredPool(asked.gpu_memory_utilization) if is_measured(config, layout) else FixedPool(estimated),
        events=asked.kv_events,
        events_to_front=config.parallel.router_policy == "kv_aware" and asked.enable_prefix_caching,
        tier=tier,
        context=grid.context,
    )
    return plan, length


def plan_tier(asked: CacheConfig, block_bytes: Sequence[int], context: int = 1) -> TierPlan:
    """The second tier that the user wants. `block_bytes`: of a block on each rank of a replica. `context` ranks that
    share the keys of a request have equally many.

    Raises:
        ValueError: it would hold no block.
    """
    num_bytes, block = asked.offloading_bytes, context * sum(block_bytes)
    if not num_bytes:
        return NO_TIER
    folder = os.path.abspath(os.path.expanduser(asked.kv_offloading_dir)) if asked.kv_offloading_dir else ""
    files = asked.kv_offloading_dir_size
    folder_bytes = _FOLDER_SHARE * num_bytes if files is None else int(files * (1 << 30))
    for flag, size in (("--kv-offloading-size", num_bytes), ("--kv-offloading-dir-size", folder_bytes)):
        if size < block:
            raise ValueError(
                f"{flag} is {format_bytes(size)}, and a block needs {format_bytes(block)}; give it at least "
                f"{1.05 * block / (1 << 30):.2g}, or leave it out"  # so that no rounding makes it too little
            )
    slots = num_bytes // block * context
    return TierPlan(slots, num_bytes // block * block, folder, folder_bytes if folder else 0)
