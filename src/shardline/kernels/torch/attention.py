"""Attention over the paged cache: keys and values of pages are gathered, and multiplied in tiles of one shape.

A row of a tile is a query of one head, or zero. Keys come in tiles of 128 from position 0 on, and in splits of 512.
A split's weights are relative to its maximum; its tiles, and then the splits, are added in order. So a query's bits
depend only on itself and on the keys that it sees: others have the weight zero, if their values are finite. All of it
is float32. Fast numerics call `scaled_dot_product_attention` in the activations' dtype in place of tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.tensors import LatentCache
from shardline.kernels.torch.kv_cache import CacheKernels

SPLIT, KEYS, ROWS = 512, 128, 8
_TILES = SPLIT // KEYS
_MOST_ELEMENTS = 8 << 20
"""Elements of scores, and of keys, that are held at a time."""


class _Part(NamedTuple):
    """Some tiles of rows, and the tiles of keys that they may see."""

    rows: slice
    num_keys: int
    hidden: Tensor
    """[B, 1, tiles of keys, tiles of rows, ROWS, KEYS] bool"""

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, rows, num_keys]: what is added to scores."""
        hidden = self.hidden.permute(0, 1, 3, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class _Batch:
    """Sequences that are computed together."""

    tokens: Tensor
    """[B, n] int64: the rows of the query; the last one is repeated if a sequence has fewer."""
    is_all: bool
    """Whether these are all rows, in order."""
    units: Tensor
    """[B * Hk * num_units] int64: where `unit` keys, one after another, lie in a cache [.., unit, D]; those that no
    row sees stand for others."""
    unit: int
    unwritten: Tensor
    """Rows of the keys [B * Hk * num_units * unit, D] that are behind a sequence's last one."""
    num_tiles: int
    splits: tuple[int, ...]
    """Those that the keys are of."""
    parts: tuple[_Part, ...]


class _Sums(NamedTuple):
    """See `ops.attention.paged.Partials`; [S, N, ...] for N rows and S splits."""

    maxima: Tensor
    sums: Tensor
    outputs: Tensor


class _Shape(NamedTuple):
    """What a plan depends on besides the tables."""

    window: int | None
    chunked: bool
    heads_each: int
    """Heads of queries that share one of keys."""
    num_kv_heads: int
    block_size: int
    dim: int


class AttentionKernels(CacheKernels):
    """See `contract.Kernels`."""

    is_exact: bool

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        out: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        sinks: Tensor | None,
        chunked: bool,
    ) -> None:
        shape = _shape_of(query, key_cache, window, chunked)
        for batch in self._plan(block_tables, query_starts, context_lens, shape):
            if not self.is_exact and softcap is None and sinks is None:
                keys = _read_written(key_cache, key_scales, batch, query.dtype)
                values = _read_written(value_cache, value_scales, batch, query.dtype)
                self._attend_fast(query, keys, values, out, batch, shape, scale)
                continue
            keys = _read_rows(key_cache, key_scales, batch)
            values = _read_written(value_cache, value_scales, batch)
            sums = _attend(_rows_of(query, batch, shape), keys, values, batch, scale, softcap)
            _put_rows(_merge(sums, sinks, batch, shape), out, batch, shape)

    def mla_attention(
        self,
        query_latent: Tensor,
        query_rope: Tensor,
        cache: LatentCache,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        query, shape = _latent_query(query_latent, query_rope, cache)
        for batch in self._plan(block_tables, query_starts, context_lens, shape):
            keys, values = _read_latents(cache, query_latent.shape[2], batch)
            sums = _attend(_rows_of(query, batch, shape), keys, values, batch, scale, None)
            _put_rows(_merge(sums, None, batch, shape), out, batch, shape)

    def mla_partials(
        self,
        query_latent: Tensor,
        query_rope: Tensor,
        cache: LatentCache,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        maxima: Tensor,
        sums: Tensor,
        outputs: Tensor,
        scale: float,
        first_split: int,
        split_step: int,
    ) -> None:
        query, shape = _latent_query(query_latent, query_rope, cache)
        to = _clear(maxima, sums, outputs)
        for batch in self._plan(block_tables, query_starts, context_lens, shape, (first_split, split_step)):
            keys, values = _read_latents(cache, query_latent.shape[2], batch)
            found = _all_rows(_attend(_rows_of(query, batch, shape), keys, values, batch, scale, None))
            _put_partials(found, to, batch, shape, first_split, split_step)

    def attention_partials(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        maxima: Tensor,
        sums: Tensor,
        outputs: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        chunked: bool,
        first_split: int,
        split_step: int,
    ) -> None:
        shape = _shape_of(query, key_cache, window, chunked)
        to = _clear(maxima, sums, outputs)
        for batch in self._plan(block_tables, query_starts, context_lens, shape, (first_split, split_step)):
            keys = _read_rows(key_cache, key_scales, batch)
            values = _read_written(value_cache, value_scales, batch)
            found = _all_rows(_attend(_rows_of(query, batch, shape), keys, values, batch, scale, softcap))
            _put_partials(found, to, batch, shape, first_split, split_step)

    def _attend_fast(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, batch: _Batch, shape: _Shape, scale: float
    ) -> None:
        rows = _heads_of(query, batch, shape).flatten(2, 3)
        found = []
        for part in batch.parts:
            own = rows[:, :, part.rows.start * ROWS : part.rows.stop * ROWS]
            mask = self._kept.value_of((part.hidden,), own.dtype, partial(part.mask, own.dtype))[:, :, : own.shape[2]]
            some = slice(part.num_keys)
            found.append(
                F.scaled_dot_product_attention(own, keys[:, :, some], values[:, :, some], attn_mask=mask, scale=scale)
            )
        all_rows = found[0] if len(found) == 1 else torch.cat(found, 2)
        _put_rows(all_rows.flatten(0, 1), out, batch, shape)

    @staticmethod
    def merge_partials(maxima: Tensor, sums: Tensor, outputs: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        # A rank has every C-th split.
        in_order = [part.transpose(0, 1).flatten(0, 1) for part in (maxima, sums, outputs)]
        out.copy_(_merged(_Sums(*in_order), sinks))

    def _plan(
        self,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        shape: _Shape,
        splits: tuple[int, int] = (0, 1),
    ) -> list[_Batch]:
        tables = block_tables, query_starts, context_lens
        return self._kept.value_of(tables, (shape, splits), lambda: _plan(*tables, shape, splits))


def _shape_of(query: Tensor, key_cache: Tensor, window: int | None, chunked: bool) -> _Shape:
    _, num_kv_heads, block_size, dim = key_cache.shape
    return _Shape(window, chunked, query.shape[1] // num_kv_heads, num_kv_heads, block_size, dim)


def _latent_query(query_latent: Tensor, query_rope: Tensor, cache: LatentCache) -> tuple[Tensor, _Shape]:
    pages = cache if isinstance(cache, Tensor) else cache.values
    query = torch.cat([query_latent, query_rope], -1)
    return query, _shape_of(query, pages[:, None], None, False)


def _read_latents(cache: LatentCache, latent_dim: int, batch: _Batch) -> tuple[Tensor, Tensor]:
    """Keys and values [B, 1, num_keys, ..] float32"""
    if isinstance(cache, Tensor):
        keys = _read_written(cache, None, batch)
    else:
        latents = _read_written(cache.values, cache.scales, batch)
        keys = torch.cat([latents, _read_rows(cache.rope_keys, None, batch)], -1)
    return keys, keys[..., :latent_dim]


def _clear(maxima: Tensor, sums: Tensor, outputs: Tensor) -> _Sums:
    """Partials of rows that see no key."""
    return _Sums(maxima.fill_(-torch.inf), sums.zero_(), outputs.zero_())


def _put_partials(found: _Sums, to: _Sums, batch: _Batch, shape: _Shape, first_split: int, split_step: int) -> None:
    for own, split in enumerate(batch.splits):
        place = (split - first_split) // split_step
        if place < len(to.maxima):
            for part, out in zip(found, to, strict=True):
                _put_rows(part[own], out[place], batch, shape)


class _Sequence(NamedTuple):
    place: int
    """Its row in the tables."""
    first_row: int
    num_rows: int
    first_key: int
    """The first key that its first row sees."""
    num_keys: int
    num_tiles: int
    """Tiles of rows."""
    key_tiles: int
    """Tiles of keys from the split of `first_key` on, rounded up so that more sequences have as many."""

    @property
    def kind(self) -> tuple[int, int, int]:
        """Sequences of one kind can be computed together."""
        return self.num_tiles, self.key_tiles, self.first_key // SPLIT


def _plan(
    block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, shape: _Shape, splits: tuple[int, int]
) -> list[_Batch]:
    starts, device = query_starts.tolist(), query_starts.device
    sequences = []
    for index, num_keys in enumerate(context_lens.tolist()):
        num_rows = starts[index + 1] - starts[index]
        if num_rows:
            first = _first_seen(num_keys - num_rows, shape)
            num_tiles = -(-num_rows * shape.heads_each // ROWS)
            sequences.append(
                _Sequence(index, starts[index], num_rows, first, num_keys, num_tiles, _key_tiles(first, num_keys))
            )
    batches = []
    for kind, group in groupby(sorted(sequences, key=lambda one: (one.kind, one.place)), key=lambda one: one.kind):
        members = list(group)
        elements = shape.num_kv_heads * kind[1] * KEYS * max(shape.dim, kind[0] * ROWS)
        each = max(1, _MOST_ELEMENTS // elements)
        for begin in range(0, len(members), each):
            some = members[begin : begin + each]
            first, step = splits
            own = range(kind[2], -(-max(one.num_keys for one in some) // SPLIT))
            own_splits = tuple(split for split in own if split >= first and (split - first) % step == 0)
            if own_splits:
                batches.append(_batch(some, block_tables, shape, starts[-1], device, own_splits, step == 1))
    return batches


def _first_seen(position: int, shape: _Shape) -> int:
    """The first key that a query at a position sees."""
    if shape.window is None:
        return 0
    return position // shape.window * shape.window if shape.chunked else max(0, position - shape.window + 1)


def _key_tiles(first_key: int, num_keys: int) -> int:
    tiles = -(-(num_keys - first_key // SPLIT * SPLIT) // KEYS)
    step = 1 << max(0, (tiles - 1).bit_length() - (1 if tiles <= _TILES else 3))
    step = max(1, step) if tiles <= _TILES else max(_TILES, step)
    return -(-tiles // step) * step


def _batch(
    sequences: list[_Sequence],
    block_tables: Tensor,
    shape: _Shape,
    num_rows: int,
    device: torch.device,
    splits: tuple[int, ...],
    has_all: bool,
) -> _Batch:
    most = max(one.num_rows for one in sequences)
    place = torch.arange(most)
    counts = torch.tensor([one.num_rows for one in sequences])[:, None]
    own = torch.minimum(place, counts - 1)
    tokens = torch.tensor([one.first_row for one in sequences])[:, None] + own
    lengths = torch.tensor([one.num_keys for one in sequences])[:, None]
    positions = lengths - counts + own
    key_tiles = sequences[0].key_tiles
    # Splits have four tiles, or all keys are in one split.
    keys = (torch.tensor(splits)[:, None] * SPLIT + torch.arange(min(key_tiles, _TILES) * KEYS)).flatten()
    unit = math.gcd(shape.block_size, KEYS)
    firsts = torch.tensor([one.first_key // unit * unit for one in sequences])[:, None]
    starts = torch.maximum(keys[::unit], firsts)
    starts = torch.where(starts < lengths, starts, firsts)
    if not has_all:  # blocks of other ranks' splits are not read
        starts = torch.where(starts // SPLIT == keys[::unit] // SPLIT, starts, -1)
    rows = torch.tensor([one.place for one in sequences])[:, None]
    blocks = block_tables[rows.to(device), (starts.clamp(min=0) // shape.block_size).to(device)].long()
    blocks = torch.where(starts.to(device) < 0, 0, blocks)[:, None]
    offsets = (starts.clamp(min=0) % shape.block_size).to(device)[:, None]
    heads = torch.arange(shape.num_kv_heads, device=device)[:, None]
    own_keys = starts[..., None] + torch.arange(unit)
    is_unwritten = (own_keys >= lengths[..., None]) | (starts[..., None] < 0)
    is_unwritten = is_unwritten.flatten(1)[:, None].expand(-1, shape.num_kv_heads, -1)
    return _Batch(
        tokens.to(device),
        torch.equal(tokens.flatten(), torch.arange(num_rows)),
        (((blocks * shape.num_kv_heads + heads) * shape.block_size + offsets) // unit).flatten(),
        unit,
        is_unwritten.flatten().nonzero()[:, 0].to(device),
        sequences[0].num_tiles,
        splits,
        tuple(_parts(positions, keys, sequences[0].num_tiles, shape, device)),
    )


def _parts(positions: Tensor, keys: Tensor, num_tiles: int, shape: _Shape, device: torch.device) -> list[_Part]:
    """positions [B, n] of the queries, and the keys that all of them see some of."""
    of_rows = positions.repeat_interleave(shape.heads_each, 1)
    of_rows = torch.cat([of_rows, of_rows[:, -1:].expand(-1, num_tiles * ROWS - of_rows.shape[1])], 1)
    of_rows = of_rows.view(len(positions), num_tiles, ROWS)
    each = max(1, _MOST_ELEMENTS // (len(positions) * shape.num_kv_heads * len(keys) * ROWS))
    parts = []
    for begin in range(0, num_tiles, each):
        own = of_rows[:, begin : begin + each]
        tiles = int((keys[::KEYS] <= own.max()).sum())
        tiles = len(keys) // KEYS if each >= num_tiles else min(len(keys) // KEYS, -(-tiles // _TILES) * _TILES)
        some = keys[: tiles * KEYS].view(tiles, 1, 1, KEYS)
        last = own[:, None, :, :, None]
        hidden = some > last
        if shape.window is not None:
            first = last // shape.window * shape.window if shape.chunked else last - shape.window + 1
            hidden |= some < first
        parts.append(_Part(slice(begin, begin + each), tiles * KEYS, hidden[:, None].to(device)))
    return parts


def _read_rows(cache: Tensor, scales: Tensor | None, batch: _Batch, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, Hk, num_keys, D]"""
    dim, count = cache.shape[-1], len(batch.tokens)
    pages = cache.view(-1, batch.unit * dim)
    if cache.itemsize == 1:
        rows = pages.view(torch.uint8).index_select(0, batch.units).view(cache.dtype).to(dtype)
    else:
        rows = pages.index_select(0, batch.units).to(dtype)
    if scales is not None:
        own = scales.view(-1, batch.unit).index_select(0, batch.units)
        rows.view(-1, batch.unit, dim).mul_(own[..., None])
    num_heads = 1 if cache.dim() == 3 else cache.shape[1]
    return rows.view(count, num_heads, -1, dim)


def _read_written(cache: Tensor, scales: Tensor | None, batch: _Batch, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `_read_rows`; what is not written is zero: it may be NaN, which a weight of zero does not hide."""
    rows = _read_rows(cache, scales, batch, dtype)
    if len(batch.unwritten):
        rows.view(-1, rows.shape[-1]).index_fill_(0, batch.unwritten, 0.0)
    return rows


def _heads_of(query: Tensor, batch: _Batch, shape: _Shape) -> Tensor:
    """The query [T, Hq, D] as [B, Hk, n, heads each, D]."""
    own = query if batch.is_all else query.index_select(0, batch.tokens.flatten())
    return own.view(*batch.tokens.shape, shape.num_kv_heads, shape.heads_each, -1).transpose(1, 2)


def _rows_of(query: Tensor, batch: _Batch, shape: _Shape) -> Tensor:
    """The query [T, Hq, D] as tiles [B * Hk, num_tiles, ROWS, D] float32."""
    heads = _heads_of(query, batch, shape)
    count, num_heads, most, each, dim = heads.shape
    rows = torch.empty(count, num_heads, batch.num_tiles * ROWS, dim, device=query.device)
    rows[:, :, : most * each].view(heads.shape).copy_(heads)
    rows[:, :, most * each :].zero_()
    return rows.view(count * num_heads, batch.num_tiles, ROWS, dim)


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, batch: _Batch, scale: float, softcap: float | None
) -> Iterator[_Sums]:
    """The partials of rows [X, t, ROWS, D] over keys and values [B, Hk, num_keys, D], X = B * Hk, a part of the rows
    after another: [S, X, rows, ..] for the S splits of the keys."""
    for part in batch.parts:
        yield _attend_part(rows[:, part.rows], keys[:, :, : part.num_keys], values, part.hidden, scale, softcap)


def _all_rows(found: Iterable[_Sums]) -> _Sums:
    """The partials of all parts of the rows."""
    sums = list(found)
    if len(sums) == 1:
        return sums[0]
    splits = max(len(one.maxima) for one in sums)
    padded = [
        [F.pad(part, (0, 0) * (part.dim() - 1) + (0, splits - len(part)), value=empty) for part in parts]
        for parts, empty in zip(zip(*sums, strict=True), (-torch.inf, 0.0, 0.0), strict=True)
    ]
    return _Sums(*(torch.cat(parts, 2) for parts in padded))


def _attend_part(
    rows: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float, softcap: float | None
) -> _Sums:
    (num, tiles, _, dim), num_keys = rows.shape, keys.shape[2]
    count, depth = num_keys // KEYS, values.shape[3]
    splits, each = -(-count // _TILES), min(count, _TILES)
    keys = keys.reshape(num, count, KEYS, dim)
    values = values[:, :, :num_keys].reshape(num, count, KEYS, depth)
    scores = _products((rows * scale)[:, None].expand(-1, count, -1, -1, -1), keys.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    of_heads = scores.view(len(hidden), -1, *scores.shape[1:])
    of_heads.masked_fill_(hidden, -torch.inf)
    in_splits = scores.view(num, splits, each, tiles, ROWS, KEYS)
    maxima = in_splits.amax(5).amax(2)
    # A row that sees nothing of a split has the weights zero there.
    shift = maxima.masked_fill(maxima == -torch.inf, 0.0)
    weights = torch.exp(in_splits.sub_(shift[:, :, None, ..., None]))
    sums = _add_tiles(weights.sum(5))
    outputs = _products(weights.view(scores.shape), values).view(num, splits, each, tiles, ROWS, depth)
    found = maxima, sums, _add_tiles(outputs)
    return _Sums(*(part.transpose(0, 1).flatten(2, 3) for part in found))


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Tiles x [X, n, t, ROWS, K] times y [X, n, K, N]: [X, n, t, ROWS, N], each product by itself."""
    num, count, tiles, _, depth = x.shape
    width = y.shape[3]
    if tiles == 1:
        product = torch.bmm(x.reshape(num * count, ROWS, depth), y.reshape(num * count, depth, width))
        return product.view(num, count, 1, ROWS, width)
    out = x.new_empty(num, count, tiles, ROWS, width)
    for index in range(num):
        for place in range(count):
            own = y[index, place].expand(tiles, depth, width)
            torch.bmm(x[index, place], own, out=out[index, place])
    return out


def _add_tiles(parts: Tensor) -> Tensor:
    """The sum over the third dim, one after another."""
    total = parts[:, :, 0]
    for index in range(1, parts.shape[2]):
        total = total + parts[:, :, index]
    return total


def _merge(found: Iterable[_Sums], sinks: Tensor | None, batch: _Batch, shape: _Shape) -> Tensor:
    """[B * Hk, t * ROWS, Dv] float32; `sinks` [Hq]. Each part of the rows is merged before the next one is computed:
    partials are as large as the outputs, for each split of the keys."""
    if sinks is not None:
        count, most = batch.tokens.shape
        sinks = sinks.view(1, shape.num_kv_heads, 1, shape.heads_each).expand(count, -1, most, -1)
        sinks = sinks.reshape(count * shape.num_kv_heads, -1)
        sinks = F.pad(sinks, (0, batch.num_tiles * ROWS - sinks.shape[1]))
    merged = []
    for part, sums in zip(batch.parts, found, strict=True):
        own = None if sinks is None else sinks[:, part.rows.start * ROWS : part.rows.stop * ROWS]
        merged.append(_merged(sums, own))
    return merged[0] if len(merged) == 1 else torch.cat(merged, 1)


def _merged(sums: _Sums, sinks: Tensor | None) -> Tensor:
    """The attention of rows [.., Dv] float32, from the partials [S, ..] of all splits in order; sinks [..]."""
    maxima = sums.maxima
    if len(maxima) == 1 and sinks is None:  # the factors below are one
        return sums.outputs[0] / sums.sums[0][..., None]
    largest = maxima.amax(0)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    factors = torch.exp(maxima - largest)
    total, output = torch.zeros_like(largest), torch.zeros_like(sums.outputs[0])
    for factor, own, own_output in zip(factors, sums.sums, sums.outputs, strict=True):
        total = total + own * factor
        output = output + own_output * factor[..., None]
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    return output / total[..., None]


def _put_rows(rows: Tensor, out: Tensor, batch: _Batch, shape: _Shape) -> None:
    """Copy rows [B * Hk, t * ROWS, ..] to their places in out [T, Hq, ..]."""
    count, most = batch.tokens.shape
    own = rows.view(count, shape.num_kv_heads, *rows.shape[1:])[:, :, : most * shape.heads_each]
    own = own.view(count, shape.num_kv_heads, most, shape.heads_each, *rows.shape[2:]).transpose(1, 2)
    if batch.is_all:
        out.view(own.shape).copy_(own)
    else:
        out.index_copy_(0, batch.tokens.flatten(), own.flatten(2, 3).flatten(0, 1).to(out.dtype))
