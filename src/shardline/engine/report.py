"""The start-up log: what was chosen, where each rank stands, what fits."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.config.units import format_bytes
from shardline.engine.kv_budget import explain
from shardline.models.hf_config import HFConfig
from shardline.models.packed_weights import packed_format
from shardline.models.partition import split_dim
from shardline.models.sizes import kv_bytes_per_token
from shardline.runtime.messages import RankReport
from shardline.runtime.setup import ReplicaSetup, latents_shared


def startup_report(setup: ReplicaSetup, ranks: Sequence[RankReport], seconds: dict[str, float]) -> list[str]:
    """Lines for people; the KV cache and concurrency lines have the wording that vLLM's users look for."""
    config, grid, spec = setup.config, setup.grid, setup.spec
    cache = config.cache
    lines = [
        f"model {setup.files.name}: {spec.model_type}, {len(spec.layers)} layers, {config.model.dtype}, "
        f"quantization {config.model.quantization or 'none'}{_packed(setup)}, "
        f"max_model_len {setup.max_model_len}",
        f"layout: tensor {grid.tensor} x pipeline {grid.pipeline} = {grid.replica_size} ranks a replica, "
        f"{config.parallel.data_parallel_size} replicas{_together(grid.data)}; "
        f"executor {config.parallel.distributed_executor_backend}, "
        f"collectives {setup.collectives if grid.world_size > 1 else 'none needed'}, "
        f"numerics {config.parallel.numerics}{_experts(setup)}",
    ]
    for report in ranks:
        place = grid.place(report.rank)
        stage = setup.stages[place.pp_rank]
        lines.append(
            f"rank {report.rank}: {report.host} {report.device} ({report.isa}, {report.threads} threads, pid "
            f"{report.pid}), dp {place.dp_rank}, pp {place.pp_rank} (layers {stage.start}-{stage.stop - 1}), "
            f"tp {place.tp_rank}; weights "
            f"{format_bytes(report.weight_bytes)}, KV {format_bytes(report.kv_bytes)}, "
            f"loaded in {report.load_seconds:.2f} s"
        )
        if report.memory is not None:
            lines.append(f"rank {report.rank} memory: {explain(report.memory, cache.gpu_memory_utilization)}")
    tokens = int(setup.max_concurrency * setup.max_model_len)
    per_token = [
        kv_bytes_per_token(spec, grid.place(rank), setup.stages, setup.kv_dtype, latents_shared=latents_shared(config))
        for rank in range(grid.world_size)
    ]
    lines += [
        f"{ranks[0].device} KV cache size: {tokens:,} tokens in {setup.kv_dtype}",
        f"KV bytes per token: {sum(per_token):,} ({', '.join(f'rank {r}: {n:,}' for r, n in enumerate(per_token))})",
        f"# {ranks[0].device} blocks: {setup.num_blocks - 1}, block size {cache.block_size}, KV groups "
        f"{len(setup.groups)}, prefix caching {'on' if cache.enable_prefix_caching else 'off'}",
        f"Maximum concurrency for {setup.max_model_len:,} tokens per request: {setup.max_concurrency:.2f}x",
        "seconds: " + ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items()),
    ]
    return lines


def _packed(setup: ReplicaSetup) -> str:
    """What became of a checkpoint's own quantization."""
    packed = packed_format(HFConfig(setup.files.config))
    if packed is None or setup.config.model.load_format == "dummy":
        return ""
    kept = "kept" if setup.keeps_packed else f"dequantized to {setup.dtype} as it loads"
    return f" (the checkpoint's is {packed}, {kept})"


def _together(replicas: int) -> str:
    return f" in lockstep, experts spread over {replicas} x tensor ranks" if replicas > 1 else ""


def _experts(setup: ReplicaSetup) -> str:
    if not setup.num_experts:
        return ""
    if setup.expert_parallel:
        counts = sorted({span.size for span in split_dim(setup.num_experts, setup.grid.tensor * setup.grid.data)})
        return f", {' or '.join(map(str, counts))} of {setup.num_experts} experts a rank"
    return f", {setup.num_experts} experts split over {setup.grid.tensor} rank{'s' * (setup.grid.tensor > 1)}"
