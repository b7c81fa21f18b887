"""The tensors in which a layer caches keys and values. This is the only formula for their shapes."""

from __future__ import annotations

import math
from typing import NamedTuple

from shardline.models.compressed import CompressedMQA
from shardline.models.spec import (
    DTYPE_BYTES,
    MLA,
    Attention,
    Indexer,
    KVDType,
    LinearAttention,
    PlannedGQA,
    SparseMLA,
)


class KVPart(NamedTuple):
    """One tensor of a layer's KV cache."""

    shape: tuple[int, ...]
    dtype: KVDType

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def kv_parts(
    attention: Attention, num_kv_heads: int, num_blocks: int, block_size: int, dtype: KVDType
) -> tuple[KVPart, ...]:
    """The cache tensors of a layer on a rank that has `num_kv_heads` of the layer's KV heads.

    Keys and values are [num_blocks, num_kv_heads, block_size, head_dim] each; a back end orders the elements of a page.
    One-byte types add scales [num_blocks, num_kv_heads, block_size] for both. Latents are one tensor [num_blocks,
    block_size, latent_dim], and `num_kv_heads` has no effect on them. With a one-byte type, their rotated part is a
    tensor of its own in bfloat16, and there is a scale [num_blocks, block_size]. Linear attention caches nothing per
    token: see `sizes.state_bytes`. Compressed attention, which only the planner knows, has no such tensors: see
    `compressed.cache_rows`.
    """
    assert not isinstance(attention, CompressedMQA)
    has_scales = DTYPE_BYTES[dtype] == 1
    if isinstance(attention, LinearAttention):
        return ()
    tokens = (num_blocks, block_size)
    chosen_by = indexer_of(attention)
    indexer: tuple[KVPart, ...] = ()
    if chosen_by is not None:
        indexer = indexer_keys(chosen_by, num_blocks, block_size)
    if isinstance(attention, MLA):
        if not has_scales:
            return (KVPart((*tokens, attention.latent_dim), dtype), *indexer)
        return (
            *indexer,
            KVPart((*tokens, attention.kv_lora_rank), dtype),
            KVPart((*tokens, attention.rope_head_dim), "bfloat16"),
            KVPart(tokens, "float32"),
        )
    shape = (num_blocks, num_kv_heads, block_size, attention.head_dim)
    scales = (KVPart(shape[:3], "float32"),) * 2 if has_scales else ()
    return (KVPart(shape, dtype), KVPart((*shape[:3], attention.value_head_dim), dtype), *scales, *indexer)


def indexer_keys(indexer: Indexer, num_blocks: int, block_size: int) -> tuple[KVPart, KVPart]:
    """The tensors of an indexer: keys of one-byte elements, and their scales."""
    tokens = (num_blocks, block_size)
    return KVPart((*tokens, indexer.head_dim), "int8"), KVPart(tokens, "float32")


def indexer_of(attention: Attention) -> Indexer | None:
    """What chooses the tokens that a token attends to; None: it attends to all of its window."""
    return attention.indexer if isinstance(attention, (SparseMLA, PlannedGQA)) else None
