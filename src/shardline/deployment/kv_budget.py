"""The size of the KV cache: a formula gives it before loading; on GPUs, what every rank measures then decides."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes, parse_bytes
from shardline.deployment.deployment import Deployment, FixedPool, KVAllocation, MeasuredPool, RankWeights
from shardline.deployment.layout import Layout
from shardline.deployment.machine import Device, Machine
from shardline.models.kv_blocks import blocks_per_request, longest_request
from shardline.models.kv_groups import KVGroup
from shardline.models.parts import DType
from shardline.models.sizes import state_step_bytes, step_bytes
from shardline.models.spec import DecoderSpec


class MemoryUse(msgspec.Struct, frozen=True):
    """The use of a GPU's memory without the KV cache, in bytes, as a rank has measured it."""

    total: int
    """All memory of the GPU."""
    others: int
    """Memory of the driver, the kernels' code, the groups' buffers and other processes."""
    weights: int
    step: int
    """The most that a step needs in addition."""
    graphs: int
    """Estimate of the memory that captured decode steps need."""

    def room(self, share: float) -> int:
        """Bytes left for the KV cache if `share` of the GPU may be used; negative: that much is missing."""
        return int(self.total * share) - self.others - self.weights - self.step - self.graphs


_CACHED_REQUESTS = 64
"""Requests of full length that the prefix cache may keep, even if fewer may run at once."""

HOST_POOL_BYTES = 4 << 30
_HOST_REQUESTS, _HOST_REQUEST_TOKENS = 16, 2048

_AUTO_LENGTH_SHARE = 0.8
"""The share of the estimated room for a GPU's KV cache on which an automatic max_model_len relies."""


def is_measured(config: EngineConfig, layout: Layout) -> bool:
    """Whether ranks measure what is left for the KV cache. They do on GPUs, unless the user has set its size.

    Ranks that share a GPU do not measure: they could not tell their own memory from that of the others.
    """
    is_set = config.cache.kv_cache_memory is not None or config.cache.num_gpu_blocks_override is not None
    return layout.device == "cuda" and not layout.shares_gpus and not is_set


def rank_room(
    config: EngineConfig,
    layout: Layout,
    machine: Machine,
    spec: DecoderSpec,
    dtype: DType,
    weights: Sequence[RankWeights],
) -> int:
    """Bytes for the KV cache of each rank, by formula.

    Raises:
        ValueError: the memory cannot even hold the weights, or not the cache that the user has set.
    """
    if config.cache.kv_cache_memory is not None:
        room = parse_bytes(config.cache.kv_cache_memory)
        _check_set_room(room, layout, machine, weights)
        return room
    if layout.device == "cpu":
        return _host_room(config, layout, machine, weights)
    scheduler = config.scheduler
    sizes = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    activations = step_bytes(spec, dtype, *sizes) + state_step_bytes(spec, *sizes)
    largest = max(rank.num_bytes for rank in weights)
    room = min(
        gpu_room(
            layout.devices_on(index, machine),
            len(layout.ranks_on(index)),
            config.cache.gpu_memory_utilization,
            largest,
            activations,
        )
        for index in layout.hosts
    )
    if is_measured(config, layout) and config.model.max_model_len == "auto":
        return int(room * _AUTO_LENGTH_SHARE)
    return room


def _host_room(config: EngineConfig, layout: Layout, machine: Machine, weights: Sequence[RankWeights]) -> int:
    rooms = []
    for index in layout.hosts:
        host, ranks = machine.hosts[index], layout.ranks_on(index)
        total = sum(weights[rank].num_bytes for _, rank in ranks)
        if total > host.free_memory:
            engines = len({engine for engine, _ in ranks})
            adapted = config.lora.enable_lora
            raise ValueError(
                f"the weights {'and adapters ' * adapted}need {format_bytes(total)} ({engines} x "
                f"{format_bytes(total // engines)}), but {_name_host(machine, index)} has "
                f"{format_bytes(host.free_memory)} available; use "
                f"{'a lower --max-loras or --max-lora-rank, ' * adapted}a smaller model, fewer replicas, "
                "--dtype bfloat16 or --quantization int8, or read weights from a disk in every step: --offload-to"
            )
        # Half of what is left: the page cache with the checkpoint, and other programs, need memory too.
        free = (host.free_memory - total) * config.cache.gpu_memory_utilization / 2
        rooms.append(int(free / len(ranks)))
    return min(rooms)


def _check_set_room(room: int, layout: Layout, machine: Machine, weights: Sequence[RankWeights]) -> None:
    """Refuse a KV cache of `room` bytes a rank that no host or GPU has: a smaller one would be a surprise."""
    for index in layout.hosts:
        host, ranks = machine.hosts[index], layout.ranks_on(index)
        if layout.device == "cpu":
            needed = sum(weights[rank].num_bytes + room for _, rank in ranks)
            available, where = host.free_memory, _name_host(machine, index)
        else:
            gpus = layout.devices_on(index, machine)
            needed = max(weights[rank].num_bytes for _, rank in ranks) + room
            available, where = min(gpu.memory_total for gpu in gpus) // -(-len(ranks) // len(gpus)), "a GPU"
        if needed > available:
            raise ValueError(
                f"weights and a KV cache of {format_bytes(room)} a rank need {format_bytes(needed)}, but {where} has "
                f"{format_bytes(available)}; lower --kv-cache-memory"
                + (", or use --offload-to" if layout.device == "cpu" else "")
            )


def _name_host(machine: Machine, index: int) -> str:
    return machine.hosts[index].name if len(machine.hosts) > 1 else "this host"


def gpu_room(gpus: Sequence[Device], num_ranks: int, share: float, weights: int, activations: int) -> int:
    """Estimated bytes for a rank's KV cache on the smallest of `gpus`, if `share` of its memory may be used.

    `weights` and the `activations` of a step are subtracted, in bytes. The estimate is good enough to refuse early
    what does not fit. Ranks that share a GPU share its memory.

    Raises:
        ValueError: nothing is left.
    """
    left = gpu_left(gpus, num_ranks, share, weights, activations)
    if left <= 0:
        raise ValueError(
            f"a GPU has to hold {format_bytes(weights)} of weights and {format_bytes(activations)} of activations "
            "beside the KV cache and cannot; use more GPUs, a smaller --max-num-batched-tokens or a smaller model"
        )
    return left


def gpu_left(gpus: Sequence[Device], num_ranks: int, share: float, weights: int, activations: int) -> int:
    """The same without a check: below zero, so many bytes are missing."""
    sharing = -(-num_ranks // len(gpus))
    usable = min(gpu.memory_free - int(gpu.memory_total * (1.0 - share)) for gpu in gpus) // sharing
    return usable - weights - activations


def useful_blocks(config: EngineConfig, groups: Sequence[KVGroup], max_model_len: int, context: int = 1) -> int:
    """The most blocks that requests of full length can use, plus the null block; `context` as in `CachePlan`.

    max_num_seqs requests are counted, and with prefix caching at least _CACHED_REQUESTS.
    """
    cache, scheduler = config.cache, config.scheduler
    assert cache.block_size is not None, "it is chosen before"
    most_requests = max(scheduler.max_num_seqs, _CACHED_REQUESTS if cache.enable_prefix_caching else 0)
    per_request = blocks_per_request(groups, max_model_len, cache.block_size, scheduler.max_num_batched_tokens, context)
    return most_requests * per_request + context


def default_host_blocks(
    config: EngineConfig, groups: Sequence[KVGroup], max_model_len: int, block_bytes: int, context: int = 1
) -> int:
    """The most blocks, with the null block, that a replica on CPUs gets if the user does not set the size.

    More would be filled with old prefixes, and is not given back. `block_bytes`: of a block on all ranks of a replica.
    """
    cache, step_tokens = config.cache, config.scheduler.max_num_batched_tokens
    assert cache.block_size is not None, "it is chosen before"
    longest, usual = (
        blocks_per_request(groups, length, cache.block_size, step_tokens, context)
        for length in (max_model_len, min(max_model_len, _HOST_REQUEST_TOKENS))
    )
    return max(HOST_POOL_BYTES // block_bytes, longest + _HOST_REQUESTS * usual + context)


def fitting_blocks(rooms: Sequence[int], block_bytes: Sequence[int], most: int, context: int = 1) -> int:
    """Blocks that fit on every rank, at most `most`. Each rank has a room and a block size in bytes, 0 if its layers
    store nothing. `context` ranks that share the keys of a request have equally many."""
    fits = [room // size for room, size in zip(rooms, block_bytes, strict=True) if size]
    return min(most, *fits) // context * context


def check_host_memory(
    layout: Layout,
    machine: Machine,
    weights: Sequence[RankWeights],
    block_bytes: Sequence[int],
    num_blocks: int,
    slot_bytes: Sequence[int],
    num_slots: int,
) -> None:
    """Refuse a requested KV cache, or a tier of `num_slots` blocks behind it, that the host's memory cannot hold.

    The host allocates pages only when they are used, so the run would fail hours later. (A GPU allocates them at the
    start, which fails at once.)

    Raises:
        ValueError: the host does not have enough memory.
    """
    for index in layout.hosts:
        ranks = [rank for _, rank in layout.ranks_on(index)]
        on_host = layout.device == "cpu"
        needed = sum(weights[rank].num_bytes + num_blocks * block_bytes[rank] for rank in ranks) if on_host else 0
        evicted = num_slots * sum(slot_bytes[rank] for rank in ranks)
        available = machine.hosts[index].free_memory
        if needed + evicted > available:
            what = "weights and KV cache" if on_host else "the"
            what += f"{' and a' * on_host} second tier of {format_bytes(evicted)}" if evicted else ""
            verb = "need" if on_host else "needs"
            flag = "--kv-offloading-size" if needed <= available else "--kv-cache-memory"
            raise ValueError(
                f"{what} {verb} {format_bytes(needed + evicted)}, but {_name_host(machine, index)} has "
                f"{format_bytes(available)} available; lower {flag}"
            )


def fixed_allocation(deployment: Deployment) -> KVAllocation | None:
    """The size of the KV pool if it is decided already; None: the ranks measure."""
    pool = deployment.cache.pool
    return KVAllocation(pool.num_blocks) if isinstance(pool, FixedPool) else None


def agree_allocation(deployment: Deployment, measured: Sequence[MemoryUse]) -> KVAllocation:
    """The size of the KV pool that fits on every rank, from what each rank has measured.

    Raises:
        ValueError: one request of max_model_len tokens does not fit. The message says which length would fit.
    """
    cache, limits, length = deployment.cache, deployment.limits, deployment.max_model_len
    assert isinstance(cache.pool, MeasuredPool)
    share = cache.pool.share
    rooms = [max(0, memory.room(share)) for memory in measured]
    num_blocks, context = fitting_blocks(rooms, cache.block_bytes, cache.useful_blocks, cache.context), cache.context
    step_tokens, usable = limits.max_num_batched_tokens, max(0, num_blocks - context)
    fits = longest_request(cache.groups, usable, cache.block_size, step_tokens, length, context)
    if fits >= length:
        return KVAllocation(num_blocks)
    rank = min(range(len(measured)), key=lambda rank: measured[rank].room(share))
    smaller = f"lower --max-model-len to {fits}, or " if fits >= 2 else ""
    raise ValueError(
        f"one request of {length} tokens does not fit the KV cache of rank {rank}: {explain(measured[rank], share)}; "
        f"{smaller}lower --max-num-batched-tokens ({limits.max_num_batched_tokens}) or --max-num-seqs "
        f"({limits.max_num_seqs}), raise --gpu-memory-utilization, or use more GPUs"
    )


def explain(memory: MemoryUse, share: float) -> str:
    """The calculation of the KV cache's room, in words."""
    parts = (
        (memory.others, "driver and others"),
        (memory.weights, "weights"),
        (memory.step, "the largest step"),
        (memory.graphs, "graphs"),
    )
    taken = "".join(f" - {format_bytes(size)} ({what})" for size, what in parts)
    return f"{share:g} x {format_bytes(memory.total)}{taken} = {format_bytes(memory.room(share))} for the KV cache"


def max_concurrency(deployment: Deployment, allocation: KVAllocation) -> float:
    """How many requests of max_model_len tokens fit in the KV pool at once."""
    cache = deployment.cache
    step_tokens = deployment.limits.max_num_batched_tokens
    length, context = deployment.max_model_len, cache.context
    per_request = blocks_per_request(cache.groups, length, cache.block_size, step_tokens, context)
    return (allocation.num_blocks - context) / per_request
