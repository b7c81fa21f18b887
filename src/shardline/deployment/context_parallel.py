"""What context parallelism needs of a model and of its options; all else is refused before anything is loaded."""

from __future__ import annotations

from shardline.config.engine import EngineConfig
from shardline.deployment.layout import Layout
from shardline.models.attention import GQA
from shardline.models.kv_blocks import SPLIT_TOKENS
from shardline.models.mla import MLA
from shardline.models.spec import DecoderSpec


def check_context_parallel(config: EngineConfig, layout: Layout, spec: DecoderSpec, block_size: int) -> None:
    """Refuse what ranks that share the keys of a request cannot compute yet.

    Raises:
        ValueError: the message says what would work.
    """
    size = layout.grid.context
    if size == 1:
        return
    asked = f"context_parallel_size {size}"
    instead = f"use tensor_parallel_size {layout.grid.sharing} instead"
    if layout.device != "cpu":
        raise ValueError(f"{asked} works on CPUs only so far; {instead}, or --device cpu")
    for attention in {layer.attention for layer in spec.layers}:
        own = attention.projections if isinstance(attention, GQA) else None
        is_special = own is not None and (own.output_gate or own.value_size is not None)
        if not isinstance(attention, GQA | MLA) or attention.num_chosen or is_special:
            raise ValueError(
                f"{asked} works with plain grouped-query and latent attention to all tokens only so far, and "
                f"{spec.model_type} has other layers; {instead}"
            )
    if SPLIT_TOKENS % block_size:
        raise ValueError(
            f"{asked} shares splits of {SPLIT_TOKENS} tokens, and --block-size {block_size} does not divide them; use "
            "16, 32 or 64"
        )


def check_splits(config: EngineConfig, max_model_len: int) -> None:
    """Refuse more ranks than a request of full length has splits.

    Raises:
        ValueError: some ranks would never have a key.
    """
    size, splits = config.parallel.context_parallel_size, -(-max_model_len // SPLIT_TOKENS)
    if size > splits:
        raise ValueError(
            f"context_parallel_size {size} is more than the {splits} split{'s' * (splits > 1)} of {SPLIT_TOKENS} "
            f"tokens that max_model_len {max_model_len} has, so ranks would have no keys; use {splits} or less"
        )
