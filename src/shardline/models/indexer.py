"""The part of sparse attention that chooses the tokens to attend to."""

from __future__ import annotations

from shardline.models.attention import AttentionWork
from shardline.models.parts import DTYPE_BYTES, KVDType, KVPart, Parameters, Part, linear_parameters


class Indexer(Part, frozen=True, array_like=True):
    """Scores all tokens for each query, and keeps the best of them (DeepSeek-V3.2, MiniMax-M3).

    A token's score is the sum over heads of weight * max(0, query . key). It caches a key for each token.
    """

    num_heads: int
    head_dim: int
    top_k: int
    """The most tokens that a token attends to. One that sees no more attends to all."""
    interleaved: bool = False
    """How queries and keys are rotated, see `Rope.interleaved`."""
    is_shared: bool = False
    """Whether the choice is that of the last layer before that makes one; then there are no parameters."""

    def parameters(self, query_size: int, hidden_size: int) -> Parameters:
        """The parameters; queries are projected from `query_size` elements."""
        if self.is_shared:
            return
        yield from linear_parameters("attention.indexer_q", self.num_heads * self.head_dim, query_size)
        yield from linear_parameters("attention.indexer_k", self.head_dim, hidden_size)
        yield from linear_parameters("attention.indexer_weights", self.num_heads, hidden_size)
        yield "attention.indexer_norm.weight", (self.head_dim,)
        yield "attention.indexer_norm.bias", (self.head_dim,)

    def kv_parts(self, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """Keys [num_blocks, block_size, head_dim], which stay in 16 bits if the cache has one-byte elements. Where the
        choice is shared, nothing is written to them: all layers have pages of one size."""
        return (KVPart((num_blocks, block_size, self.head_dim), dtype if DTYPE_BYTES[dtype] > 1 else "bfloat16"),)

    def work(self, key_bytes: float, ratio: int = 1) -> AttentionWork:
        """All keys are read: one of `key_bytes` for each `ratio` tokens. Every rank has all heads."""
        flops = 0 if self.is_shared else 2 * self.num_heads * self.head_dim / ratio
        return AttentionWork(None, key_bytes / ratio, flops, flops)
