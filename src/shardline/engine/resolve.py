"""From what the user asked for to a resolved configuration: every choice made, every refusal given, before loading."""

from __future__ import annotations

import dataclasses
import logging
from typing import cast

from shardline.config.engine import EngineConfig, ParallelConfig
from shardline.config.topology import RankGrid
from shardline.config.units import format_bytes, parse_bytes
from shardline.engine.gpu_memory import gpu_memory
from shardline.engine.host_memory import allowed_cpus, available_host_memory
from shardline.engine.kv_budget import gpu_kv_bytes
from shardline.models.hf_config import HFConfig
from shardline.models.kv_capacity import longest_request
from shardline.models.lookup import decoder_spec
from shardline.models.packed_weights import PackedFormat, packed_format
from shardline.models.partition import Span, check_expert_parallel, check_tensor_parallel, kv_groups
from shardline.models.sharding import Numerics
from shardline.models.sizes import kv_block_bytes, stage_spans, weight_bytes
from shardline.models.spec import MLA, DecoderSpec, DType
from shardline.models.weight_formats import scheme_of
from shardline.runtime.loader.checkpoint import Checkpoint
from shardline.runtime.loader.hub import resolve_model
from shardline.runtime.setup import kv_dtype, measures_memory, pool_blocks, replica_grid

_log = logging.getLogger(__name__)

_CPU_DTYPES: dict[str, DType] = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16"}

_AUTO_LENGTH_SHARE = 0.8
"""Of the room that is estimated for a GPU's KV cache, what an automatic max_model_len counts on."""


def resolve(config: EngineConfig) -> EngineConfig:
    """`config` with every open choice made for this host.

    Raises:
        ValueError: the model, the shape or the memory cannot be; the message says what would work.
    """
    parallel = _resolve_parallel(config.parallel)
    dummy = config.model.load_format == "dummy"
    files = resolve_model(config.model.model, config.model.revision, weights=not dummy)
    checkpoint_dtype = decoder_spec(files.config, None).dtype
    packed = packed_format(HFConfig(files.config))
    # Of 4 bits and a scale, bfloat16 keeps what matters.
    dtype = _resolve_dtype(config.model.dtype, checkpoint_dtype if packed is None else "bfloat16")
    asked = config.model.max_model_len
    spec = decoder_spec(files.config, asked if isinstance(asked, int) else None)
    if isinstance(asked, int) and asked > spec.max_position_embeddings:
        raise ValueError(
            f"max_model_len {asked} is more than the {spec.max_position_embeddings} positions this model has; "
            f"use {spec.max_position_embeddings} or less"
        )
    if parallel.device == "cpu" and config.model.quantization == "fp8":
        raise ValueError("quantization fp8 needs a GPU, and this is the CPU; use int8")
    _check_kv_dtype(config.cache.kv_cache_dtype, spec, parallel.device)
    check_tensor_parallel(spec, parallel.tensor_parallel_size)
    if parallel.enable_expert_parallel:
        check_expert_parallel(spec, parallel.tensor_parallel_size, parallel.data_parallel_size)
    stages = stage_spans(spec, parallel.pipeline_parallel_size, parallel.pipeline_stages)
    if not dummy:
        Checkpoint.open(files.folder).check(spec, packed)
    grid = replica_grid(parallel)
    scheme = _resolve_quantization(config, parallel, packed)
    placed = dataclasses.replace(
        config, parallel=parallel, model=dataclasses.replace(config.model, quantization=scheme or "none")
    )
    kv_bytes = _kv_bytes_per_rank(placed, spec, grid, stages, dtype)
    # Ranks that share a GPU could not tell their own memory from the others'.
    measured = parallel.device == "cuda" and parallel.collectives != "gloo" and measures_memory(config)
    if measured and asked == "auto":
        kv_bytes = int(kv_bytes * _AUTO_LENGTH_SHARE)
    model = dataclasses.replace(config.model, model=str(files.folder), dtype=dtype, quantization=scheme)
    cache = dataclasses.replace(config.cache, kv_cache_memory=kv_bytes)
    resolved = dataclasses.replace(config, model=model, parallel=parallel, cache=cache)
    length = _resolve_length(asked, resolved, spec, grid, stages)
    if decoder_spec(files.config, length).layers != spec.layers:
        raise ValueError(
            "this model's rope scaling follows max_model_len, so that the memory at hand would decide the answers; "
            f"set it yourself, for example --max-model-len {length}"
        )
    num_blocks = pool_blocks(resolved, spec, grid, stages, length)
    _check_memory(resolved, spec, grid, stages, num_blocks)
    if measured:
        # What was estimated served to refuse early; the ranks measure once they have loaded.
        resolved = dataclasses.replace(resolved, cache=config.cache)
    resolved = dataclasses.replace(resolved, model=dataclasses.replace(model, max_model_len=length))
    reasons = _reasons(config, resolved, spec, stages, packed)
    if reasons:
        _log.info("chosen: %s", "; ".join(reasons))
    return resolved


def _reasons(
    asked: EngineConfig,
    chosen: EngineConfig,
    spec: DecoderSpec,
    stages: tuple[Span, ...],
    packed: PackedFormat | None,
) -> list[str]:
    """What was left open, what was chosen for it, and why."""
    reasons = []
    if asked.model.dtype == "auto":
        reasons.append(f"dtype {chosen.model.dtype} (the checkpoint's is {packed or spec.dtype})")
    if not isinstance(asked.model.max_model_len, int):
        whole = chosen.model.max_model_len == spec.max_position_embeddings
        why = "all that the model has" if whole else "what the KV cache holds"
        reasons.append(f"max_model_len {chosen.model.max_model_len} ({why})")
    parallel = chosen.parallel
    ranks = replica_grid(parallel).replica_size
    if asked.parallel.distributed_executor_backend == "auto":
        reasons.append(f"executor {parallel.distributed_executor_backend} ({ranks} rank{'s' * (ranks > 1)} a replica)")
    if asked.parallel.cpu_threads is None:
        total = ranks * parallel.data_parallel_size
        reasons.append(f"{parallel.cpu_threads} threads a rank ({allowed_cpus()} cores, ranks in all: {total})")
    if asked.parallel.pipeline_stages is None and len(stages) > 1:
        layers = ",".join(str(stage.size) for stage in stages)
        reasons.append(f"pipeline_stages {layers} (balanced by the weights that 32 tokens read)")
    if measures_memory(chosen):
        reasons.append(f"KV cache measured on every GPU ({asked.cache.gpu_memory_utilization:g} of its memory)")
    elif asked.cache.kv_cache_memory is None and asked.cache.num_gpu_blocks_override is None:
        assert isinstance(chosen.cache.kv_cache_memory, int)
        share = f"{asked.cache.gpu_memory_utilization:g} of half the free memory, shared by all ranks"
        reasons.append(f"up to {format_bytes(chosen.cache.kv_cache_memory)} of KV cache a rank ({share})")
    return reasons


def _resolve_parallel(parallel: ParallelConfig) -> ParallelConfig:
    if parallel.context_parallel_size > 1:
        raise ValueError("context_parallel_size above 1 is not supported yet; use tensor_parallel_size instead")
    world = replica_grid(parallel).world_size
    backend = parallel.distributed_executor_backend
    if backend == "auto":
        backend = "uni" if world == 1 else "mp"
    if backend == "uni" and world > 1:
        raise ValueError(f"distributed_executor_backend 'uni' runs one rank, and this layout has {world}; use 'mp'")
    if backend == "threads" and parallel.collectives == "gloo":
        raise ValueError("collectives 'gloo' needs processes; use distributed_executor_backend 'mp'")
    device = parallel.device
    if device == "auto":
        device = "cuda" if gpu_memory() else "cpu"
    if device == "cuda" and backend == "threads":
        raise ValueError("distributed_executor_backend 'threads' is for the CPU; use 'mp' with device cuda")
    if device == "cpu" and parallel.collectives == "nccl":
        raise ValueError("collectives 'nccl' needs GPUs; use 'shm' or 'gloo' with device cpu")
    if device == "cuda" and parallel.collectives == "shm":
        raise ValueError("collectives 'shm' move host memory; use 'nccl' with device cuda")
    if device == "cuda" and parallel.collectives == "gloo":
        _log.warning("collectives gloo on GPUs are a test mode: slow, through host memory; ranks may share a GPU")
    cores = allowed_cpus()
    if parallel.cpu_threads is not None and parallel.cpu_threads > cores:
        raise ValueError(f"cpu_threads {parallel.cpu_threads} is more than the {cores} cores this process may use")
    ranks = world * parallel.num_engines
    threads = parallel.cpu_threads or max(1, cores // ranks)
    if threads * ranks > cores:
        _log.warning("%d ranks of %d threads share %d cores: expect them to wait for each other", ranks, threads, cores)
    return dataclasses.replace(parallel, distributed_executor_backend=backend, device=device, cpu_threads=threads)


def _resolve_quantization(config: EngineConfig, parallel: ParallelConfig, packed: PackedFormat | None) -> str | None:
    """The scheme by its full name; on a GPU weights that the checkpoint has packed stay so, if "none" does not say
    otherwise."""
    asked, on_gpu = config.model.quantization, parallel.device == "cuda"
    is_there = packed is not None and config.model.load_format != "dummy"
    if asked is None and not (is_there and on_gpu):
        return None
    if asked == "none":
        return "none" if is_there and on_gpu else None
    if asked is not None and scheme_of(asked) != "w4a16":
        return asked
    if not on_gpu:
        raise ValueError("quantization w4a16 needs a GPU, and this is the CPU; use none, int8 or int4")
    if packed is None or not is_there:
        raise ValueError("quantization w4a16 is for GPTQ and AWQ checkpoints, and this is none; use int4")
    if parallel.numerics == "fast" and parallel.tensor_parallel_size > 1:
        raise ValueError(
            "numerics fast cuts rows of weights, and those of this checkpoint are packed in groups; use --numerics "
            "exact, or --quantization none"
        )
    return packed.quantization


def _check_kv_dtype(asked: str, spec: DecoderSpec, device: str) -> None:
    if asked == "auto":
        return
    if device == "cpu" and any(isinstance(layer.attention, MLA) for layer in spec.layers):
        raise ValueError(f"kv_cache_dtype {asked} of latent attention needs a GPU, and this is the CPU; use auto")
    if asked != "int8" and device == "cpu":
        raise ValueError(f"kv_cache_dtype {asked} needs a GPU, and this is the CPU; use int8")


def _resolve_dtype(asked: str, checkpoint: str) -> DType:
    if asked == "auto":
        # The CPU kernels compute in float32 and bfloat16; float16 checkpoints keep their precision in float32.
        return _CPU_DTYPES.get(checkpoint, "float32")
    if asked not in _CPU_DTYPES:
        raise ValueError(f"dtype {asked} is not supported on the CPU; use bfloat16 or float32")
    return _CPU_DTYPES[asked]


def _kv_bytes_per_rank(
    config: EngineConfig, spec: DecoderSpec, grid: RankGrid, stages: tuple[Span, ...], dtype: DType
) -> int:
    if config.cache.kv_cache_memory is not None:
        return parse_bytes(config.cache.kv_cache_memory)
    if config.parallel.device == "cuda":
        return gpu_kv_bytes(config, spec, grid, stages, dtype, gpu_memory())
    engines = config.parallel.num_engines
    weights = _engine_weight_bytes(config, spec, grid, stages, dtype)
    total, available = weights * engines, available_host_memory()
    if total > available:
        raise ValueError(
            f"the weights need {format_bytes(total)} ({engines} x {format_bytes(weights)}) and this host has "
            f"{format_bytes(available)} available; use a smaller model, fewer replicas, --dtype bfloat16 or "
            "--quantization int8"
        )
    # Half of what is left: the page cache that holds the checkpoint, and the other programs, need room too.
    free = (available - total) * config.cache.gpu_memory_utilization / 2
    return int(free / (grid.world_size * engines))


def _engine_weight_bytes(
    config: EngineConfig, spec: DecoderSpec, grid: RankGrid, stages: tuple[Span, ...], dtype: DType
) -> int:
    numerics = cast(Numerics, config.parallel.numerics)
    scheme = None if config.model.quantization == "none" else config.model.quantization
    whole_experts = config.parallel.enable_expert_parallel
    return sum(
        weight_bytes(spec, grid.place(rank), stages, dtype, numerics, scheme, whole_experts)
        for rank in range(grid.world_size)
    )


def _check_memory(
    config: EngineConfig, spec: DecoderSpec, grid: RankGrid, stages: tuple[Span, ...], num_blocks: int
) -> None:
    """Refuse a KV cache that was asked for and cannot be: its pages are taken as they are used, hours later. (On a GPU
    they are taken at the start, which then fails.)"""
    if config.parallel.device == "cuda":
        return
    stored, block_size = kv_dtype(config), config.cache.block_size
    blocks = sum(kv_block_bytes(spec, grid.place(rank), stages, stored, block_size) for rank in range(grid.world_size))
    weights = _engine_weight_bytes(config, spec, grid, stages, cast(DType, config.model.dtype))
    needed = config.parallel.num_engines * (weights + num_blocks * blocks)
    available = available_host_memory()
    if needed > available:
        raise ValueError(
            f"weights and KV cache need {format_bytes(needed)} and this host has {format_bytes(available)} available; "
            "lower --kv-cache-memory"
        )


def _resolve_length(
    asked: int | str | None, config: EngineConfig, spec: DecoderSpec, grid: RankGrid, stages: tuple[Span, ...]
) -> int:
    """max_model_len as a number that the KV pool can hold.

    Raises:
        ValueError: one request of the wanted length does not fit.
    """
    wanted = asked if isinstance(asked, int) else spec.max_position_embeddings
    num_blocks = pool_blocks(config, spec, grid, stages, wanted)
    cache = config.cache
    step_tokens = config.scheduler.max_num_batched_tokens
    fits = longest_request(kv_groups(spec), num_blocks - 1, cache.block_size, step_tokens, wanted)
    if fits >= wanted:
        return wanted
    if fits < 2:
        raise ValueError(
            f"the KV cache has room for {max(0, num_blocks - 1)} blocks of {cache.block_size} tokens, too few for any "
            "request; raise --kv-cache-memory"
        )
    if asked == "auto":
        return fits
    raise ValueError(
        f"one request of {wanted} tokens does not fit the KV cache, which holds {fits}; use --max-model-len {fits} or "
        "less (or auto), or raise --kv-cache-memory"
    )
