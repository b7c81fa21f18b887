"""Attention to the tokens that an indexer chooses, and other parts of attention that only the planner knows."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shardline.models.attention import GQA, AttentionWork, cached_token_bytes
from shardline.models.mla import MLA
from shardline.models.partition import Span
from shardline.models.parts import KVDType, KVPart, Parameters, linear_parameters

_LAUNCHES = 6


class Indexer(msgspec.Struct, frozen=True, array_like=True):
    """The part of sparse attention that chooses the tokens to attend to (DeepSeek-V3.2, MiniMax-M3).

    It caches a key of one-byte elements and a float32 scale per token.
    """

    num_heads: int
    head_dim: int
    top_k: int
    """The most tokens that a token attends to."""

    def parameters(self, query_size: int, hidden_size: int) -> Parameters:
        """The parameters; queries are projected from `query_size` elements."""
        yield from linear_parameters("attention.indexer_q", self.num_heads * self.head_dim, query_size)
        yield from linear_parameters("attention.indexer_k", self.head_dim, hidden_size)
        yield from linear_parameters("attention.indexer_weights", self.num_heads, hidden_size)
        yield "attention.indexer_norm.weight", (self.head_dim,)
        yield "attention.indexer_norm.bias", (self.head_dim,)

    def kv_parts(self, num_blocks: int, block_size: int) -> tuple[KVPart, KVPart]:
        """Keys of one-byte elements, and their scales."""
        tokens = (num_blocks, block_size)
        return KVPart((*tokens, self.head_dim), "int8"), KVPart(tokens, "float32")

    def work(self, key_bytes: float, ratio: int = 1) -> AttentionWork:
        """All keys are read: one of `key_bytes` for each `ratio` tokens. Every rank has all heads."""
        flops = 2 * self.num_heads * self.head_dim / ratio
        return AttentionWork(None, key_bytes / ratio, flops, flops)

    def chosen_work(self, attention: GQA | MLA, ranks: int, dtype: KVDType) -> Iterator[AttentionWork]:
        """The work of attention to the chosen tokens, whose cache has the indexer's keys too."""
        keys = sum(part.num_bytes for part in self.kv_parts(1, 1))
        flops = 2 * attention.multiplications_per_pair / ranks
        yield self.work(keys)
        yield AttentionWork(self.top_k, cached_token_bytes(attention, ranks, dtype) - keys, flops, flops)


class PlannedGQA(GQA, frozen=True, array_like=True, tag=True):
    """Grouped-query attention with parts that only the planner knows."""

    output_gate: bool = False
    """Whether q has as many further rows, whose sigmoid multiplies the output (Qwen3.5)."""
    value_size: int | None = None
    """Elements of a value head; None: as many as of a key head (other in MiMo-V2)."""
    indexer: Indexer | None = None
    """None: a token sees all tokens of its window."""

    @property
    def value_head_dim(self) -> int:
        """Elements of a value head."""
        return self.head_dim if self.value_size is None else self.value_size

    @property
    def query_rows(self) -> int:
        """Rows of the projection of queries."""
        return super().query_rows * (1 + self.output_gate)

    @property
    def num_launches(self) -> int:
        """See `Attention.num_launches`."""
        return super().num_launches + _LAUNCHES * (self.indexer is not None)

    def parameters(self, hidden_size: int) -> Parameters:
        """See `Attention.parameters`."""
        yield from super().parameters(hidden_size)
        if self.indexer is not None:
            yield from self.indexer.parameters(hidden_size, hidden_size)

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Attention.split`."""
        return None if part.startswith("attention.indexer") else super().split(part, rank, ranks)

    def kv_parts(self, num_kv_heads: int, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """Keys and values as in `GQA`, then those of the indexer."""
        indexer = () if self.indexer is None else self.indexer.kv_parts(num_blocks, block_size)
        return (*super().kv_parts(num_kv_heads, num_blocks, block_size, dtype), *indexer)

    def work(self, ranks: int, dtype: KVDType, *, expands: bool = False) -> Iterator[AttentionWork]:
        """See `Attention.work`."""
        if self.indexer is None:
            return super().work(ranks, dtype)
        return self.indexer.chosen_work(self, ranks, dtype)


class SparseMLA(MLA, frozen=True, array_like=True, tag=True):
    """Latent attention to the tokens that an indexer chooses. Prompts compute in the dims of the latent too."""

    indexer: Indexer = Indexer(64, 128, 2048)

    @property
    def num_launches(self) -> int:
        """See `Attention.num_launches`."""
        return super().num_launches + _LAUNCHES

    def parameters(self, hidden_size: int) -> Parameters:
        """See `Attention.parameters`."""
        yield from super().parameters(hidden_size)
        yield from self.indexer.parameters(self.projections.q_lora_rank or hidden_size, hidden_size)

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Attention.split`."""
        return None if part.startswith("attention.indexer") else super().split(part, rank, ranks)

    def kv_parts(self, num_kv_heads: int, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """Latents as in `MLA`, and the keys of the indexer."""
        latents = super().kv_parts(num_kv_heads, num_blocks, block_size, dtype)
        return (*latents, *self.indexer.kv_parts(num_blocks, block_size))

    def work(self, ranks: int, dtype: KVDType, *, expands: bool = False) -> Iterator[AttentionWork]:
        """See `Attention.work`."""
        return self.indexer.chosen_work(self, ranks, dtype)
