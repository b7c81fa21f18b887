"""The reasons of a deployment in words: for each choice that was left open, what was chosen and why."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes
from shardline.deployment.cache import BLOCK_TOKENS
from shardline.deployment.deployment import Deployment, MeasuredPool
from shardline.deployment.formats import general_rule, has_e4m3
from shardline.deployment.kv_budget import HOST_POOL_BYTES
from shardline.models.parts import DTYPE_BYTES
from shardline.models.stored_layout import BlockLayout


def explain_choices(deployment: Deployment, asked: EngineConfig, room: int) -> Deployment:
    """The deployment with its reasons. `room` is the number of bytes that each rank has for its KV cache."""
    return replace(deployment, reasons=tuple(_reasons(deployment, asked, room)))


def _reasons(deployment: Deployment, asked: EngineConfig, room: int) -> list[str]:
    spec, grid, stored = deployment.spec, deployment.grid, deployment.model.stored
    host = deployment.machine.hosts[0]
    reasons = []
    if stored.is_packed and asked.model.quantization is None and asked.model.load_format != "dummy":
        reasons.append(f"weights {_weights(deployment)}")
    held, wanted = deployment.weight_format.name, asked.model.quantization
    if held not in ("plain", "packed", wanted):
        reasons.append(f"weights {held} (what GPUs have for {wanted})")
    if asked.parallel.device == "auto" and deployment.device == "cuda":
        names = [host.devices[index].name for index in host.of_kind("cuda")]
        counts = " and ".join(f"{count} x {name}" for name, count in Counter(names).items())
        reasons.append(f"device cuda (this host has {counts})")
    if asked.model.dtype == "auto":
        reasons.append(f"dtype {deployment.dtype} (the checkpoint's is {stored if stored.is_packed else spec.dtype})")
    elif asked.model.dtype in ("half", "float16"):
        why = (
            "precise enough for packed weights" if deployment.dtype == "bfloat16" else "it holds every float16 exactly"
        )
        reasons.append(f"dtype {deployment.dtype} (no kernel computes in float16; {why})")
    if stored.unused:
        reasons.append(f"{', '.join(stored.unused)} of the checkpoint not used (kv_cache_dtype decides)")
    if not isinstance(asked.model.max_model_len, int):
        whole = deployment.max_model_len == spec.max_position_embeddings
        why = "all that the model has" if whole else "what the KV cache holds"
        reasons.append(f"max_model_len {deployment.max_model_len} ({why})")
    if asked.parallel.distributed_executor_backend == "auto":
        ranks = grid.replica_size
        reasons.append(f"executor {deployment.executor} ({ranks} rank{'s' * (ranks > 1)} a replica)")
    if asked.parallel.cpu_threads is None:
        first = deployment.placements[0][0]
        total = sum(place.host == first.host for places in deployment.placements for place in places)
        cores = deployment.machine.hosts[first.host].cores
        reasons.append(f"{first.threads} threads a rank ({cores} cores, ranks in all: {total})")
    if asked.parallel.pipeline_stages is None and len(deployment.stages) > 1:
        layers = ",".join(str(stage.size) for stage in deployment.stages)
        reasons.append(f"pipeline_stages {layers} (balanced by the weights that 32 tokens read)")
    if spec.keeps_states:
        reasons.append("no prefix cache (layers keep a state for each request)")
    cache = asked.cache
    if cache.block_size is None and deployment.cache.block_size != BLOCK_TOKENS:
        reasons.append(f"block_size {deployment.cache.block_size} ({BLOCK_TOKENS} keys of a head take less than 4 KiB)")
    elif cache.block_size is not None and cache.block_size != deployment.cache.block_size:
        reasons.append(f"block_size {deployment.cache.block_size} (the smallest; {cache.block_size} was asked for)")
    if isinstance(deployment.cache.pool, MeasuredPool):
        reasons.append(f"KV cache measured on every GPU ({cache.gpu_memory_utilization:g} of its memory)")
    elif cache.kv_cache_memory is None and cache.num_gpu_blocks_override is None:
        largest = max(deployment.cache.block_bytes)
        used, most = deployment.cache.pool.num_blocks * largest, deployment.cache.useful_blocks * largest
        share = f"{cache.gpu_memory_utilization:g} of half the free memory, shared by all ranks"
        if deployment.device == "cpu" and used + largest <= min(room, most):
            share = (
                f"at most {format_bytes(HOST_POOL_BYTES)} a replica, or what its longest request and 16 of 2,048 "
                f"tokens need; --kv-cache-memory gives more, here up to {format_bytes(room).replace(' ', '')}"
            )
            room = used
        reasons.append(f"up to {format_bytes(room)} of KV cache a rank ({share})")
    elif cache.num_gpu_blocks_override is None and deployment.cache.pool.num_blocks == deployment.cache.useful_blocks:
        used = deployment.cache.useful_blocks * max(deployment.cache.block_bytes)
        reasons.append(f"{format_bytes(used)} of the {format_bytes(room)} set for the KV cache (requests use no more)")
    return reasons


def _weights(deployment: Deployment) -> str:
    """How the checkpoint is quantized, and in how many bits products with its weights compute."""
    stored = deployment.model.stored
    name = str(stored).replace(", ", " ", 1)
    device = "CPU" if deployment.device == "cpu" else "GPU"
    if not deployment.keeps_packed:
        return f"{name}, dequantized to {deployment.dtype} ({device})"
    weights, inputs = general_rule(stored).packing.bits, 8 * DTYPE_BYTES[deployment.dtype]
    if any(isinstance(layout, BlockLayout) and layout.quantizes_input for layout in stored.layouts):
        inputs = 8
    option = "; --quantization fp8_w8a8 rounds activations too" if has_e4m3(stored) and device == "CPU" else ""
    return f"{name}, W{weights}A{inputs} ({device}{option})"
