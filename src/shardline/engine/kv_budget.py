"""The size of the KV pool, from what every rank has measured."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.config.units import format_bytes
from shardline.models.kv_capacity import longest_request
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
