"""The pages of a rank's KV cache: who owns them, and which layer uses which page tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shardline.models.kv_groups import KVGroup
from shardline.models.partition import Span, split_dim
from shardline.models.parts import KVDType, KVPart
from shardline.runtime.decoder import DecoderLayer
from shardline.runtime.parallel.groups import RankGroups


class KVStore:
    """A rank's pages, which only this object allocates.

    Slot d of the pool serves, in each group, the d-th layer of that group in the rank's stage. Groups whose pages have
    another shape use slots of their own.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        dtype: KVDType,
        pages_empty: Callable[[Sequence[int], torch.dtype], torch.Tensor],
    ) -> None:
        """`dtype`: the type of the cached keys and values; `pages_empty`: the back end's memory for pages."""
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._dtype = dtype
        self._pages_empty = pages_empty
        self._slots: dict[tuple[int, tuple[KVPart, ...]], tuple[torch.Tensor, ...]] = {}
        self._num_bytes = 0

    def bind_layers(
        self, layers: list[DecoderLayer], span: Span, kv_groups: tuple[KVGroup, ...], ranks: RankGroups
    ) -> int:
        """Give every layer of a stage its pages. Returns this rank's bytes; ranks that share a pool count an equal part
        each."""
        for group in kv_groups:
            own_layers = [index for index in group.layers if span.start <= index < span.stop]
            for depth, index in enumerate(own_layers):
                attention = layers[index - span.start].attention
                parts = attention.cache_parts(self.num_blocks, self._block_size, self._dtype)
                if (depth, parts) not in self._slots:
                    self._slots[depth, parts] = tuple(self._allocate(part, ranks.kv_pool) for part in parts)
                attention.bind_cache(*self._slots[depth, parts])
        for layer in layers:
            layer.share_cache(layers, span.start)
        if ranks.kv_pool is None:
            return self._num_bytes
        assert self._num_bytes == len(ranks.kv_pool), "the segment was cut for this pool"
        return split_dim(self._num_bytes, ranks["tensor"].size)[ranks["tensor"].rank].size

    def _allocate(self, part: KVPart, shared: memoryview | None) -> torch.Tensor:
        """An uninitialised tensor."""
        offset, dtype = self._num_bytes, getattr(torch, part.dtype)
        self._num_bytes += part.num_bytes
        if shared is None:
            return self._pages_empty(part.shape, dtype)
        count = math.prod(part.shape)
        return torch.frombuffer(shared, dtype=dtype, count=count, offset=offset).view(part.shape)
