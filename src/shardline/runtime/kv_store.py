"""The pages of a rank's KV cache: which layer uses which, and what copies blocks elsewhere and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardline.deployment.deployment import CachePlan
from shardline.messages.copies import BlockCopies, CopyResult
from shardline.models.partition import Span, split_dim
from shardline.models.parts import KVPart
from shardline.runtime.decoder import DecoderLayer
from shardline.runtime.parallel.groups import RankGroups


class BlockCopier(Protocol):
    """Keeps a rank's parts of evicted blocks, in slots that the engine names."""

    def copy_blocks(self, copies: BlockCopies, *, may_wait: bool) -> CopyResult:
        """Run the copies of a plan. `may_wait`: whether nothing else waits for this step."""


class KVStore:
    """A rank's pages, which only this object allocates and copies.

    Slot d of the pool serves, in each group, the d-th layer of that group in the rank's stage. Groups whose pages have
    another shape use slots of their own.
    """

    def __init__(
        self,
        num_blocks: int,
        cache: CachePlan,
        pages_empty: Callable[[Sequence[int], torch.dtype], torch.Tensor],
    ) -> None:
        """`pages_empty`: the back end's memory for pages."""
        self.num_blocks = num_blocks
        """Blocks of the pool."""
        self._cache = cache
        self._pages_empty = pages_empty
        self._slots: dict[tuple[int, tuple[KVPart, ...]], tuple[Tensor, ...]] = {}
        self._pages: list[list[Tensor]] = []
        self._allocated = 0
        self.num_bytes = 0
        """Bytes of this rank. Ranks that share a pool count an equal part each."""
        self.copier: BlockCopier | None = None
        """Where blocks are copied to; None: no plan copies any."""

    def bind_layers(self, layers: list[DecoderLayer], span: Span, ranks: RankGroups) -> None:
        """Give every layer of a stage its pages."""
        cache, bound = self._cache, dict[int, tuple[Tensor, ...]]()
        for group in cache.groups:
            own_layers = [index for index in group.layers if span.start <= index < span.stop]
            slots: list[tuple[Tensor, ...]] = []
            for depth, index in enumerate(own_layers):
                attention = layers[index - span.start].attention
                parts = attention.cache_parts(self.num_blocks, cache.block_size, cache.dtype)
                if (depth, parts) not in self._slots:
                    self._slots[depth, parts] = tuple(self._allocate(part, ranks.kv_pool) for part in parts)
                slots.append(self._slots[depth, parts])
                bound[index] = slots[-1]
            self._pages.append([pages for slot in _own_slots(slots, ranks) for pages in slot])
        for layer in layers:
            layer.attention.bind_cache(*bound.get(layer.storing, ()))
        self.num_bytes = self._allocated
        if ranks.kv_pool is not None:
            assert self._allocated == len(ranks.kv_pool), "the segment was cut for this pool"
            self.num_bytes = split_dim(self._allocated, ranks["tensor"].size)[ranks["tensor"].rank].size

    def _allocate(self, part: KVPart, shared: memoryview | None) -> Tensor:
        """An uninitialised tensor."""
        offset, dtype = self._allocated, getattr(torch, part.dtype)
        self._allocated += part.num_bytes
        if shared is None:
            return self._pages_empty(part.shape, dtype)
        count = math.prod(part.shape)
        return torch.frombuffer(shared, dtype=dtype, count=count, offset=offset).view(part.shape)

    @property
    def pages(self) -> Sequence[Sequence[Tensor]]:
        """For each KV group, the tensors [num_blocks, ...] of which this rank copies a block."""
        return self._pages

    def copy_blocks(self, copies: BlockCopies, *, may_wait: bool) -> CopyResult:
        """Run the copies of a plan, see `BlockCopier`."""
        assert self.copier is not None, "a plan copies blocks, and there is nothing to copy them to"
        return self.copier.copy_blocks(copies, may_wait=may_wait)


def _own_slots(slots: list[tuple[Tensor, ...]], ranks: RankGroups) -> list[tuple[Tensor, ...]]:
    """Those that this rank copies. If ranks share a pool, each copies some layers.

    A rank overwrites a block, or reads what was fetched, only after the first exchange of a step, so after the copies
    of all ranks.
    """
    if ranks.kv_pool is None:
        return slots
    group = ranks["tensor"]
    own = split_dim(len(slots), group.size)[group.rank]
    return slots[own.start : own.stop]
