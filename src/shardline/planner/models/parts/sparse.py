"""Attention to the tokens that an indexer chooses, and other parts of attention that only the planner knows."""

from __future__ import annotations

from collections.abc import Iterator

from shardline.models.attention import GQA, AttentionWork, cached_token_bytes
from shardline.models.indexer import Indexer
from shardline.models.partition import Span
from shardline.models.parts import KVDType, KVPart, Parameters

_LAUNCHES = 6


class PlannedIndexer(Indexer, frozen=True, array_like=True):
    """An indexer whose keys have one-byte elements and a float32 scale."""

    def kv_parts(self, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """Keys of one-byte elements, and their scales."""
        tokens = (num_blocks, block_size)
        return KVPart((*tokens, self.head_dim), "int8"), KVPart(tokens, "float32")


class PlannedGQA(GQA, frozen=True, array_like=True, tag=True):
    """Grouped-query attention with parts that only the planner knows."""

    indexer: PlannedIndexer | None = None
    """None: a token sees all tokens of its window."""

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
        indexer = () if self.indexer is None else self.indexer.kv_parts(num_blocks, block_size, dtype)
        return (*super().kv_parts(num_kv_heads, num_blocks, block_size, dtype), *indexer)

    def work(self, ranks: int, dtype: KVDType, *, expands: bool = False) -> Iterator[AttentionWork]:
        """See `Attention.work`."""
        if self.indexer is None:
            return super().work(ranks, dtype)
        return self._chosen_work(self.indexer, ranks, dtype)

    def _chosen_work(self, indexer: PlannedIndexer, ranks: int, dtype: KVDType) -> Iterator[AttentionWork]:
        """The work of attention to the chosen tokens, whose cache has the indexer's keys too."""
        keys = sum(part.num_bytes for part in indexer.kv_parts(1, 1, dtype))
        flops = 2 * self.multiplications_per_pair / ranks
        yield indexer.work(keys)
        yield AttentionWork(indexer.top_k, cached_token_bytes(self, ranks, dtype) - keys, flops, flops)
