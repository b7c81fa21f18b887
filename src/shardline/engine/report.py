"""The start-up log: what was decided, where each rank runs, and what the KV cache can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardline.config.fields import format_bytes
from shardline.deployment.deployment import Deployment, KVAllocation, MeasuredPool
from shardline.deployment.kv_budget import explain, max_concurrency
from shardline.messages.worker import RankReport
from shardline.models.partition import split_dim
from shardline.models.sizes import kv_bytes_per_token, stage_bubbles
from shardline.weights.base import PLAIN


def startup_report(
    deployment: Deployment,
    engine: int,
    allocation: KVAllocation,
    ranks: Sequence[RankReport],
    seconds: dict[str, float],
) -> list[str]:
    """Lines for people; those about the KV cache and the concurrency are worded as in vLLM."""
    grid, spec, cache, stages = deployment.grid, deployment.spec, deployment.cache, deployment.stages
    replicas, length = len(deployment.placements) * grid.data, deployment.max_model_len
    first_replica = engine * grid.data
    lines = [
        f"model {deployment.model.name}: {spec.model_type}, {len(spec.layers)} layers, {deployment.dtype}, "
        f"quantization {_quantization(deployment)}, "
        f"max_model_len {length}",
        f"layout: tensor {grid.tensor}{_context(grid.context)} x pipeline {grid.pipeline} = {grid.replica_size} ranks "
        f"a replica, "
        f"{replicas} replicas{_together(grid.data)}; "
        f"executor {deployment.executor}, "
        f"collectives {deployment.collectives if grid.world_size > 1 else 'none needed'}, "
        f"numerics {deployment.numerics}{_experts(deployment)}",
    ]
    for report in ranks:
        place = grid.place(report.rank)
        stage = stages[place.pp_rank]
        elsewhere = _elsewhere(deployment, report.rank)
        lines.append(
            f"rank {report.rank}: {_where(deployment, engine, report)} {report.device} ({report.isa}, "
            f"{report.threads} threads, pid {report.pid}), dp {first_replica + place.dp_rank}, "
            f"pp {place.pp_rank} (layers {stage.start}-{stage.stop - 1}), tp {place.tp_rank}"
            f"{f', cp {place.cp_rank}' * (grid.context > 1)}; weights "
            f"{format_bytes(report.weight_bytes)}{elsewhere}, KV {format_bytes(report.kv_bytes)}, "
            f"loaded in {report.load_seconds:.2f} s"
        )
        lines += [f"rank {report.rank}: {fallback}" for fallback in report.fallbacks]
        if report.memory is not None and isinstance(cache.pool, MeasuredPool):
            lines.append(f"rank {report.rank} memory: {explain(report.memory, cache.pool.share)}")
    if deployment.state_bytes:
        most, each = deployment.limits.max_num_seqs, ", ".join(map(format_bytes, deployment.state_bytes))
        lines.append(f"states of {most} requests beside the KV cache, each of any length: {each} (--max-num-seqs)")
    lines += _pipeline_lines(deployment)
    lines += _draft_lines(deployment, allocation)
    concurrency = max_concurrency(deployment, allocation)
    # A token lies in one replica only, and each replica has a pool of its own.
    per_token = [
        kv_bytes_per_token(spec, grid.place(rank), stages, cache.dtype, latents_shared=cache.latents_shared)
        for rank in range(grid.replica_size)
    ]
    each = " a replica" if replicas > 1 else ""
    lines += [
        f"{ranks[0].device} KV cache size: {int(concurrency * length):,} tokens{each} in {cache.dtype}",
        f"KV bytes per token: {sum(per_token):,} ({', '.join(f'rank {r}: {n:,}' for r, n in enumerate(per_token))})",
        f"# {ranks[0].device} blocks: {allocation.num_blocks - cache.context}, block size {cache.block_size}, "
        f"KV groups {len(cache.groups)}, prefix caching {'on' if cache.prefix_caching else 'off'}",
        f"Maximum concurrency for {length:,} tokens per request: {concurrency:.2f}x"
        + (f"{each}, {replicas * concurrency:.2f}x on all {replicas}" if each else ""),
        "seconds: " + ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items()),
    ]
    return lines


def _pipeline_lines(deployment: Deployment) -> list[str]:
    """What unequal stages cost, if there are several."""
    if deployment.grid.pipeline == 1:
        return []
    decode, prompts = stage_bubbles(deployment.spec, deployment.stages)
    return [
        f"pipeline bubble of unequal stages: {decode:.0%} while requests decode, {prompts:.0%} while prompts are "
        "computed; --pipeline-stages sets their layers"
    ]


def _draft_lines(deployment: Deployment, allocation: KVAllocation) -> list[str]:
    """The draft model, if there is one, and its part of each rank's memory."""
    draft, own = deployment.draft, deployment.of_draft
    if draft is None or own is None:
        return []
    blocks = allocation.num_blocks + draft.num_spare_blocks
    has_it = [rank for rank in range(deployment.grid.replica_size) if draft.weights[rank].num_bytes]
    taken = ", ".join(
        f"rank {rank}: weights {format_bytes(draft.weights[rank].num_bytes)}, KV "
        f"{format_bytes(blocks * draft.block_bytes[rank])}"
        for rank in has_it
    )
    return [
        f"draft model {draft.model.name}: {draft.spec.model_type}, {len(draft.spec.layers)} layers, quantization "
        f"{_quantization(own)}, up to {deployment.limits.speculation.num_speculative_tokens} tokens; of the above "
        f"{taken}"
    ]


def check_known_answers(ranks: Sequence[RankReport]) -> None:
    """Compare what kernels of one path give for fixed numbers.

    Raises:
        RuntimeError: some ranks have other bits than most; the message names them.
    """
    for isa in {report.isa for report in ranks}:
        alike = [report for report in ranks if report.isa == isa and report.known_answer]
        counts = Counter(report.known_answer for report in alike)
        if len(counts) > 1:
            (usual, _), *_ = counts.most_common(1)
            unlike = [f"rank {rank.rank} on {rank.host}" for rank in alike if rank.known_answer != usual]
            raise RuntimeError(
                f"the {isa} kernels of {', '.join(unlike)} give other bits than those of other ranks: answers would "
                "depend on the rank; install one image on all hosts, and test the memory (`dmesg | grep -i mce`)"
            )


def _where(deployment: Deployment, engine: int, report: RankReport) -> str:
    """The host of a rank, and if there are several hosts, the address that its peers use."""
    hosts = deployment.machine.hosts
    if len(hosts) == 1:
        return report.host
    index = deployment.placements[engine][report.rank].host
    return f"node {index} ({report.host}, {hosts[index].address})"


def _elsewhere(deployment: Deployment, rank: int) -> str:
    """Where weights lie that do not stay in a rank's memory; empty: all stay."""
    weights = deployment.weights[rank]
    copied = min(weights.read_bytes, weights.host_bytes)
    read = weights.read_bytes - copied
    parts = [f"{format_bytes(copied)} copied from host memory"] * bool(copied)
    parts += [f"{format_bytes(read)} read from {deployment.offload.folder}"] * bool(read)
    return "".join([" in memory", *(f" and {part}" for part in parts)]) if parts else ""


def _quantization(deployment: Deployment) -> str:
    """The format of linear weights, and what happens to a checkpoint's own quantization."""
    held, stored = deployment.weight_format, deployment.model.stored
    name = "none" if held == PLAIN else held.name
    if not stored.is_packed or deployment.model.load_format == "dummy":
        return name
    kept = "kept" if deployment.keeps_packed else f"dequantized to {deployment.dtype} as it loads"
    return f"{name} (the checkpoint's is {stored}, {kept})"


def _context(ranks: int) -> str:
    return f" x context {ranks}" if ranks > 1 else ""


def _together(replicas: int) -> str:
    return f" in lockstep, experts spread over {replicas} x tensor ranks" if replicas > 1 else ""


def _experts(deployment: Deployment) -> str:
    count, grid = deployment.num_experts, deployment.grid
    if not count:
        return ""
    if deployment.expert_parallel:
        counts = sorted(
            {span.size for span in split_dim(count + deployment.expert_balancing.num_redundant_experts, grid.expert)}
        )
        return f", {' or '.join(map(str, counts))} of {count} experts a rank"
    return f", {count} experts split over {grid.sharing} rank{'s' * (grid.sharing > 1)}"
