"""What only DeepSeek-V4 has: attention to compressed tokens, and several residual streams. The planner alone knows it.

Each layer attends to a window of tokens. Most layers also attend to entries that stand for 4 or for 128 tokens each:
softmax-weighted sums of projections. Where they stand for 4, two spans overlap in each entry, and an indexer chooses
some of the entries. One vector is the key and the value of all heads (DeepSeek-V4 technical report, section 2.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardline.models.attention import Attention, AttentionWork
from shardline.models.partition import Span, split_dim
from shardline.models.parts import DTYPE_BYTES, KVDType, Parameters
from shardline.models.spec import DecoderSpec, Layer
from shardline.planner.models.parts.sparse import PlannedIndexer

OVERLAPPING = 4
"""The ratio at which each entry is made of two spans."""
_FLOAT32 = 4
_ROTATED_BYTES = 2
_SCALED_GROUP = 64
_INDEX_SCALE_BYTES = 4
_STREAM_LAUNCHES = 4
"""Kernels that mix residual streams for a layer's two blocks, and write to them."""


class CompressedMQA(Attention, frozen=True, array_like=True, tag=True):
    """Multi-query attention to a window and to compressed entries. Queries and outputs pass through low ranks."""

    head_dim: int
    query_rank: int
    rotated_size: int
    """Elements of a key that are rotated. They stay in 16 bits if the cache has one-byte elements."""
    output_groups: int
    """Groups of heads whose outputs are projected apart, to `output_rank` elements each."""
    output_rank: int
    ratio: int
    """Tokens for each compressed entry; 0: there are none."""
    recent: int
    """Tokens of the window that every layer has."""
    indexer: PlannedIndexer | None
    """What chooses entries: it has a key for each. None: a token sees all of them."""

    @property
    def window(self) -> int | None:
        """The window of layers without entries."""
        return None if self.ratio else self.recent

    @property
    def key_dim(self) -> int:
        """Elements of a cached key."""
        return self.head_dim

    @property
    def output_size(self) -> int:
        """Elements of the output for a token, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def multiplications_per_pair(self) -> int:
        """Multiplications of one query with one key, which is its value too, over all heads."""
        return 2 * self.num_heads * self.head_dim

    @property
    def num_launches(self) -> int:
        """Norm, down, norms, up, rotation, attention, inverse rotation, two outputs; compressors have two."""
        return 9 + 2 * (self.ratio > 0) + 8 * (self.indexer is not None)

    @property
    def overlap(self) -> int:
        """Spans of which an entry is made."""
        return 2 if self.ratio == OVERLAPPING else 1

    def parameters(self, hidden_size: int) -> Parameters:
        """See `Attention.parameters`."""
        heads, size, rank = self.num_heads, self.head_dim, self.query_rank
        outputs = self.output_groups * self.output_rank
        yield "attention.q_down.weight", (rank, hidden_size)
        yield "attention.q_norm.weight", (rank,)
        yield "attention.q_up.weight", (heads * size, rank)
        yield "attention.kv_down.weight", (size, hidden_size)
        yield "attention.kv_norm.weight", (size,)
        yield "attention.sinks.bias", (heads,)
        if self.ratio:
            yield from _compressor("attention.compressor", self, size, hidden_size)
        if (indexer := self.indexer) is not None:
            yield from _compressor("attention.indexer_compressor", self, indexer.head_dim, hidden_size)
            yield "attention.indexer_q.weight", (indexer.num_heads * indexer.head_dim, rank)
            yield "attention.indexer_weights.weight", (indexer.num_heads, hidden_size)
        yield "attention.o_down.weight", (outputs, heads * size // self.output_groups)
        yield "attention.o.weight", (hidden_size, outputs)

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Attention.split`: heads of queries, and groups of outputs. Every rank has the rest."""
        if part == "attention.q_up":
            return self.split_heads(ranks)[rank].scaled(self.head_dim)
        if part in ("attention.o_down", "attention.o"):
            return split_dim(self.output_groups, ranks)[rank].scaled(self.output_rank)
        if part == "attention.sinks":
            return self.split_heads(ranks)[rank]
        return None

    def work(self, ranks: int, dtype: KVDType, *, expands: bool = False) -> Iterator[AttentionWork]:
        """See `Attention.work`: of the window, of entries, and what the indexer reads."""
        pair = 2 * self.multiplications_per_pair / ranks
        window, entries, keys = cache_rows(self, dtype)
        yield AttentionWork(window.window, window.num_bytes, pair, pair)
        if entries is not None:
            chosen = None if self.indexer is None else self.indexer.top_k * entries.ratio
            flops = pair / entries.ratio
            yield AttentionWork(chosen, entries.num_bytes / entries.ratio, flops, flops)
        if keys is not None and self.indexer is not None:
            yield self.indexer.work(keys.num_bytes, keys.ratio)


class StreamedLayer(Layer, frozen=True, array_like=True, cache_hash=True):
    """A layer whose blocks read a mixture of several residual streams and write to all (hyper-connections)."""

    streams: int = 4

    @property
    def residual_streams(self) -> int:
        """Number of residual streams."""
        return self.streams

    @property
    def num_launches(self) -> int:
        """See `Layer.num_launches`."""
        return super().num_launches + _STREAM_LAUNCHES * (self.streams > 1)

    def activation_elements(self, hidden_size: int, ranks: int) -> float:
        """See `Layer.activation_elements`. Each block reads the streams twice and writes them."""
        streams = 2 * 3 * self.streams * hidden_size if self.streams > 1 else 0
        return super().activation_elements(hidden_size, ranks) + streams

    def parameters(self, hidden_size: int, num_experts: int | None = None) -> Parameters:
        """See `Layer.parameters`. Hyper-connections have products of all streams, their offsets and three factors."""
        yield from super().parameters(hidden_size, num_experts)
        mixtures = (2 + self.streams) * self.streams
        for block in ("attention", "feed_forward") if self.streams > 1 else ():
            yield f"{block}_streams.weight", (mixtures, self.streams * hidden_size)
            yield f"{block}_streams.bias", (mixtures + 3,)

    def head_parameters(self, hidden_size: int) -> Parameters:
        """The parameters that mix the streams for the lm_head."""
        if self.streams > 1:
            yield "head_streams.weight", (self.streams, self.streams * hidden_size)
            yield "head_streams.bias", (self.streams + 1,)


@dataclass(frozen=True)
class CacheRows:
    """Rows that a layer caches: one for each `ratio` tokens, of the last `window` tokens or of all."""

    num_bytes: int
    ratio: int = 1
    window: int | None = None


def is_compressed(spec: DecoderSpec) -> bool:
    """Whether the layers have this attention."""
    return bool(compressed_layers([(spec.layers[0], 1)]))


def compressed_layers(counted: Iterable[tuple[Layer, int]]) -> list[tuple[CompressedMQA, int]]:
    """Of layers with their numbers, the attention of those that have this one."""
    return [(layer.attention, count) for layer, count in counted if isinstance(layer.attention, CompressedMQA)]


def cache_rows(attention: CompressedMQA, dtype: KVDType) -> tuple[CacheRows, CacheRows | None, CacheRows | None]:
    """(the window, compressed entries, the indexer's keys) of one layer; None: there are none.

    With one-byte types, a row has a byte of scale for each 64 elements that are not rotated, and one byte of padding
    (vLLM's fp8_ds_mla: 584 bytes), and a key of the indexer has a float32 scale.
    """
    row, scale = attention.head_dim * DTYPE_BYTES[dtype], 0
    if DTYPE_BYTES[dtype] == 1:
        row += attention.rotated_size * (_ROTATED_BYTES - 1)
        row += (attention.head_dim - attention.rotated_size) // _SCALED_GROUP + 1
        scale = _INDEX_SCALE_BYTES
    entries = CacheRows(row, attention.ratio) if attention.ratio else None
    keys = None
    if attention.indexer is not None:
        keys = CacheRows(attention.indexer.head_dim * DTYPE_BYTES[dtype] + scale, attention.ratio)
    return CacheRows(row, 1, attention.recent), entries, keys


def state_rows(attention: CompressedMQA) -> tuple[CacheRows | None, CacheRows | None]:
    """What the compressors of one layer keep until they have made an entry, and then a key of the indexer.

    These are a vector and its scores for each token of a span, in float32.
    """
    if not attention.ratio:
        return None, None
    span, parts = attention.overlap * attention.ratio, 2 * attention.overlap * _FLOAT32
    entries = CacheRows(parts * attention.head_dim, 1, span)
    indexer = attention.indexer
    return entries, None if indexer is None else CacheRows(parts * indexer.head_dim, 1, span)


def _compressor(name: str, attention: CompressedMQA, size: int, hidden_size: int) -> Parameters:
    yield f"{name}_kv.weight", (attention.overlap * size, hidden_size)
    yield f"{name}_gate.weight", (attention.overlap * size, hidden_size)
    yield f"{name}_position.bias", (attention.ratio, attention.overlap * size)
    yield f"{name}_norm.weight", (size,)
