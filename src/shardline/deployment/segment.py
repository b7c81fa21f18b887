"""The layout of the memory segment that the ranks of one engine on one host map."""

from __future__ import annotations

from shardline.deployment.deployment import Deployment, FixedPool
from shardline.segment.layout import SegmentLayout


def segment_layout(deployment: Deployment, engine: int, host: int) -> SegmentLayout:
    """The layout of the segment that an engine has on one of the machine's hosts."""
    num_layers = len(deployment.spec.layers) if deployment.num_experts else 0
    ranks = deployment.ranks_on(engine, host)
    return SegmentLayout(deployment.grid, ranks, num_layers, deployment.num_experts, _shared_kv_bytes(deployment))


def _shared_kv_bytes(deployment: Deployment) -> tuple[int, ...]:
    """Bytes of each stage's KV pool if its ranks share one.

    They share one if they are on one host and the model caches latents only, since every rank needs all latents.
    """
    grid, cache = deployment.grid, deployment.cache
    if (
        grid.sharing == 1
        or not cache.latents_shared
        or not all(layer.attention.shares_cache for layer in deployment.spec.layers)
    ):
        return ()
    assert isinstance(cache.pool, FixedPool), "host memory is not measured"
    per_stage = [0] * grid.pipeline
    for rank in range(grid.replica_size):
        per_stage[grid.place(rank).pp_rank] += cache.pool.num_blocks * cache.block_bytes[rank]
    return tuple(per_stage)
