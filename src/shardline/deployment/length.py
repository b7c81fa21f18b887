"""The longest request that a deployment accepts."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.config.engine import EngineConfig
from shardline.models.kv_blocks import longest_request
from shardline.models.kv_groups import KVGroup
from shardline.models.spec import DecoderSpec


def check_length(asked: int | str | None, spec: DecoderSpec) -> None:
    """Refuse a max_model_len that is larger than the number of positions of the model.

    Raises:
        ValueError: the model has fewer positions.
    """
    if isinstance(asked, int) and asked > spec.max_position_embeddings:
        raise ValueError(
            f"max_model_len {asked} is more than the {spec.max_position_embeddings} positions this model has; "
            f"use {spec.max_position_embeddings} or less"
        )


def choose_length(
    config: EngineConfig, groups: Sequence[KVGroup], wanted: int, num_blocks: int, context: int = 1
) -> int:
    """max_model_len in tokens: `wanted` if a pool of `num_blocks` can hold one such request; `context` as in
    `CachePlan`.

    If it cannot and max_model_len is "auto", this is the length of the longest request that the pool can hold.

    Raises:
        ValueError: one request of the wanted length does not fit.
    """
    cache, step_tokens = config.cache, config.scheduler.max_num_batched_tokens
    assert cache.block_size is not None, "it is chosen before"
    fits = longest_request(groups, num_blocks - context, cache.block_size, step_tokens, wanted, context)
    if fits >= wanted:
        return wanted
    flag = "--kv-cache-memory" if cache.num_gpu_blocks_override is None else "--num-gpu-blocks-override"
    if fits < 2:
        raise ValueError(
            f"the KV cache has room for {max(0, num_blocks - context)} blocks of {cache.block_size} tokens, too few "
            f"for any request; raise {flag}"
        )
    if config.model.max_model_len == "auto":
        return fits
    raise ValueError(
        f"one request of {wanted} tokens does not fit the KV cache, which holds {fits}; use --max-model-len {fits} or "
        f"less (or auto), or raise {flag}"
    )
