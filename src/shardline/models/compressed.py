"""What only DeepSeek-V4 has: attention to compressed tokens, and several residual streams. The planner alone knows it.

Each layer attends to a window of tokens. Most layers also attend to entries that stand for 4 or for 128 tokens each:
softmax-weighted sums of projections. Where they stand for 4, two spans overlap in each entry, and an indexer chooses
some of the entries. One vector is the key and the value of all heads (DeepSeek-V4 technical report, section 2.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardline.models.spec import DTYPE_BYTES, DecoderSpec, KVDType, Layer, PlannedGQA

Shape = tuple[int, ...]

OVERLAPPING = 4
"""The ratio at which each entry is made of two spans."""
_FLOAT32 = 4
_ROTATED_BYTES = 2
_SCALED_GROUP = 64
_INDEX_SCALE_BYTES = 4


class CompressedMQA(PlannedGQA, frozen=True, array_like=True, tag=True):
    """Multi-query attention to a window and to compressed entries. Queries and outputs pass through low ranks.

    `window` is set in layers without entries. The indexer chooses entries: it has a key for each.
    """

    query_rank: int = 1024
    rotated_size: int = 64
    """Elements of a key that are rotated. They stay in 16 bits if the cache has one-byte elements."""
    output_groups: int = 8
    """Groups of heads whose outputs are projected apart, to `output_rank` elements each."""
    output_rank: int = 1024
    ratio: int = 0
    """Tokens for each compressed entry; 0: there are none."""
    recent: int = 128
    """Tokens of the window that every layer has."""

    @property
    def overlap(self) -> int:
        """Spans of which an entry is made."""
        return 2 if self.ratio == OVERLAPPING else 1


class StreamedLayer(Layer, frozen=True, array_like=True, cache_hash=True):
    """A layer whose blocks read a mixture of several residual streams and write to all (hyper-connections)."""

    streams: int = 4

    @property
    def residual_streams(self) -> int:
        """Number of residual streams."""
        return self.streams


@dataclass(frozen=True)
class CacheRows:
    """Rows that a layer caches: one for each `ratio` tokens, of the last `window` tokens or of all."""

    num_bytes: int
    ratio: int = 1
    window: int | None = None


def is_compressed(spec: DecoderSpec) -> bool:
    """Whether the layers have this attention."""
    return isinstance(spec.layers[0].attention, CompressedMQA)


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


def token_bytes(attention: CompressedMQA, dtype: KVDType) -> float:
    """Bytes of compressed entries and of the indexer's keys for each token of one layer."""
    return sum(rows.num_bytes / rows.ratio for rows in cache_rows(attention, dtype)[1:] if rows is not None)


def compressed_parameters(attention: CompressedMQA, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    """(name without `layers.{i}.`, full shape) of the attention's parameters."""
    heads, size, rank = attention.num_heads, attention.head_dim, attention.query_rank
    outputs = attention.output_groups * attention.output_rank
    yield "attention.q_down.weight", (rank, hidden_size)
    yield "attention.q_norm.weight", (rank,)
    yield "attention.q_up.weight", (heads * size, rank)
    yield "attention.kv_down.weight", (size, hidden_size)
    yield "attention.kv_norm.weight", (size,)
    yield "attention.sinks.bias", (heads,)
    if attention.ratio:
        yield from _compressor("attention.compressor", attention, size, hidden_size)
    if (indexer := attention.indexer) is not None:
        yield from _compressor("attention.indexer_compressor", attention, indexer.head_dim, hidden_size)
        yield "attention.indexer_q.weight", (indexer.num_heads * indexer.head_dim, rank)
        yield "attention.indexer_weights.weight", (indexer.num_heads, hidden_size)
    yield "attention.o_down.weight", (outputs, heads * size // attention.output_groups)
    yield "attention.o.weight", (hidden_size, outputs)


def _compressor(name: str, attention: CompressedMQA, size: int, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}_kv.weight", (attention.overlap * size, hidden_size)
    yield f"{name}_gate.weight", (attention.overlap * size, hidden_size)
    yield f"{name}_position.bias", (attention.ratio, attention.overlap * size)
    yield f"{name}_norm.weight", (size,)


def stream_parameters(layer: Layer, hidden_size: int) -> Iterator[tuple[str, Shape]]:
    """The parameters of a layer's two hyper-connections: products of all streams, their offsets and three factors."""
    streams = layer.residual_streams
    mixtures = (2 + streams) * streams
    for block in ("attention", "feed_forward") if streams > 1 else ():
        yield f"{block}_streams.weight", (mixtures, streams * hidden_size)
        yield f"{block}_streams.bias", (mixtures + 3,)


def head_stream_parameters(spec: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    """The parameters that mix the streams for the lm_head."""
    if (streams := spec.residual_streams) > 1:
        yield "head_streams.weight", (streams, streams * spec.hidden_size)
        yield "head_streams.bias", (streams + 1,)
