"""Attention whose keys and values several ranks share: split i of a request's keys is of rank i % C.

The ranks of a context group share the heads of each layer, as tensor-parallel ranks do. Where a sequence attends,
either its queries travel or its keys do, whichever is less. If queries travel, each rank computes all heads for its
own splits, and sends each rank what it has computed of that rank's heads: (m, l, o) of each split in float32. If
keys travel, as in prefill, each rank gets those of its own heads and computes them as if it had stored them. The bits
are those of one rank either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.kernels.tensors import LinearInput, QuantizedLatents
from shardline.models.attention import GQA
from shardline.models.kv_blocks import SPLIT_TOKENS
from shardline.models.mla import MLA
from shardline.models.parts import KVDType, KVPart
from shardline.runtime.key_share import SharedRun, Tables
from shardline.runtime.layers.attention import AttentionLayer, KVPages
from shardline.runtime.layers.context import LayerLoader, StageContext
from shardline.runtime.layers.mla import LatentAttentionLayer
from shardline.runtime.ops.attention.partials import Partials
from shardline.runtime.ops.attention.rope import RotaryTables
from shardline.runtime.ops.scale import scale_rows
from shardline.runtime.step import Rows


class Places(NamedTuple):
    """The blocks of a sequence whose keys travel."""

    own: Tensor
    """Those of this rank."""
    num_sent: npt.NDArray[np.int64]
    """Numbers of those of each rank."""
    tables: Tables
    """The blocks as they arrive."""


class SharedKeys:
    """The exchanges of attention over keys that the ranks of a context group share."""

    def __init__(self, stage: StageContext, kv_group: int) -> None:
        self.group = stage.context_group
        self.kernels = stage.kernels
        self._kv_group = kv_group
        first = stage.group.rank - self.group.rank
        self.peers = range(first, first + self.group.size)
        """The ranks of the context group, by their places in the tensor-parallel one."""

    def runs(self, rows: Rows) -> Iterator[tuple[SharedRun, Tables]]:
        """Each run of a step, with its part of the tables."""
        assert rows.shared is not None
        return zip(*rows.shared[self._kv_group], strict=True)

    def attend_in_parts(
        self,
        run: SharedRun,
        heads: Sequence[int],
        compute: Callable[[int, Partials, int, int], None],
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Compute parts of the heads of each peer, and merge into `out` [R, own heads, dim] what all have of own heads.

        compute(peer, partials, first_split, split_step) computes those of own splits for a peer's heads.
        """
        group, dim = self.group, out.shape[2]
        # Ranks that have none of few splits take no part.
        num_ranks = min(group.size, run.num_splits)
        shape = run.num_splits // num_ranks, run.num_rows
        each = [shape[0] * shape[1] * count for count in heads]
        # What one rank sends fits into one piece: maxima, sums and outputs, one after another.
        widths = (2 + dim,) if num_ranks == 1 else (1, 1, dim)
        num_sent = sum(each) if group.rank < num_ranks else 0
        pieces = [self.kernels.activation_empty(torch.float32, num_sent, width) for width in widths]
        at = 0
        for peer, count in enumerate(each if num_sent else ()):
            of_peer = _partials([piece[at : at + count] for piece in pieces], (*shape, heads[peer]), dim)
            compute(peer, of_peer, run.first_split + group.rank, group.size)
            at += count
        counts, own = _counts(num_ranks, tuple(each)), heads[group.rank]
        received = [group.all_to_all_rows(piece, counts, num_ranks * each[group.rank]) for piece in pieces]
        self.kernels.merge_partials(*_partials(received, (num_ranks, *shape, own), dim), out, sinks)

    def find_places(self, run: SharedRun, tables: Tables, block_size: int) -> Places:
        """Where the blocks of the one sequence of a run lie, and where they will."""
        last = -(-int(tables.lens[0]) // block_size)
        places = np.arange(run.first_split * SPLIT_TOKENS // block_size, last)
        owners = places * block_size // SPLIT_TOKENS % self.group.size
        own = torch.from_numpy(tables.blocks[0].numpy()[places[owners == self.group.rank]])
        arrived = np.zeros((1, last), dtype=np.int32)
        arrived[0, places[np.argsort(owners, kind="stable")]] = np.arange(len(places), dtype=np.int32)
        num_sent = np.bincount(owners, minlength=self.group.size)
        return Places(own, num_sent, Tables(torch.from_numpy(arrived), tables.starts, tables.lens))

    def bring(self, of_peers: Sequence[Tensor], places: Places) -> Tensor:
        """The blocks of a sequence, [num_blocks, own heads, ...], those of the first rank first; `of_peers` has the
        pages of each peer's heads, [blocks, heads, ...]."""
        own = of_peers[self.group.rank]
        if own.dtype.itemsize == 1:
            of_peers = [pages.view(torch.int8) for pages in of_peers]
        row = own[0, 0].numel()
        sent = torch.cat([torch.index_select(pages, 0, places.own).view(-1, row) for pages in of_peers])
        counts = torch.from_numpy(np.outer(places.num_sent, [pages.shape[1] for pages in of_peers]))
        num_blocks = int(places.num_sent.sum())
        rows = self.group.all_to_all_rows(sent, counts, num_blocks * own.shape[1])
        return rows.view(own.dtype).view(num_blocks, *own.shape[1:])


class SharedAttentionLayer(AttentionLayer):
    """As `AttentionLayer`, for a rank that has keys and values of its own splits, of all heads of its context group."""

    def __init__(self, loader: LayerLoader, name: str, spec: GQA, tables: RotaryTables, kv_group: int) -> None:
        super().__init__(loader, name, spec, tables, kv_group)
        stage = loader.stage
        self._keys = keys = SharedKeys(stage, kv_group)
        spans = [stage.spans(f"{name}.{part}.weight") for part in self.parts]
        self._widths = [sum(span[peer].size for span in spans) for peer in keys.peers]
        self._heads = [self.count_heads([span[peer].size for span in spans]) for peer in keys.peers]
        """Of each peer, as `num_heads`."""
        self._held = spec.kv_heads_held(stage.group.size, keys.group.size, stage.group.rank)
        kv_spans = [spec.kv_spans_of(stage.group.size)[peer] for peer in keys.peers]
        distinct = list(dict.fromkeys(kv_spans))
        self._place_of = [distinct.index(span) for span in kv_spans]
        """Which of the pages have the KV heads of each peer."""
        self._pages: list[KVPages] = []
        self._one = torch.ones(1, device=stage.device)

    def cache_parts(self, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """The tensors that `bind_cache` expects: those of each peer's KV heads, one after another."""
        return tuple(part for heads in self._held for part in self.spec.kv_parts(heads, num_blocks, block_size, dtype))

    def bind_cache(self, *pages: Tensor) -> None:
        """Give the layer the memory for its keys and values."""
        each = len(pages) // len(self._held)
        of_heads = [KVPages(*pages[first : first + each]) for first in range(0, len(pages), each)]
        self._pages = [of_heads[place] for place in self._place_of]

    def __call__(self, x: LinearInput, rows: Rows, left: Rows) -> Tensor:
        qkv = self.qkv(x, rows)
        if self.spec.norms.norms_all_heads:
            each = zip(self._gather_normed(qkv), self._pages, strict=True)
            queries = [self.store_heads(*heads, pages, rows) for heads, pages in each]
        else:
            columns = torch.split(self._keys.group.all_gather_columns(qkv, self._widths), self._widths, dim=1)
            queries = [self.store_in(*of_peer, rows) for of_peer in zip(columns, self._heads, self._pages, strict=True)]
        if left is not rows:
            queries = [left.take(query) for query in queries]
        return self.output(self._attend_shared(queries, left).flatten(1), left)

    def _gather_normed(self, qkv: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values [T, heads, head_dim] of each peer. Norms over all heads need whole rows, so each
        rank normalises its own part of them before."""
        gathered = []
        for part, heads in zip(self.normed_heads(qkv, self.num_heads), zip(*self._heads, strict=True), strict=True):
            widths = [count * self.spec.head_dim for count in heads]
            dense = scale_rows(self._kernels, part.flatten(1), self._one)  # a gather needs dense rows
            columns = torch.split(self._keys.group.all_gather_columns(dense, widths), widths, dim=1)
            gathered.append([of_peer.view(len(qkv), -1, self.spec.head_dim) for of_peer in columns])
        return list(zip(*gathered, strict=True))

    def _attend_shared(self, queries: Sequence[Tensor], rows: Rows) -> Tensor:
        """The attention output [Q, local heads, head_dim], for the queries of each peer."""
        keys, spec = self._keys, self.spec
        own = queries[keys.group.rank]
        out = self._kernels.activation_empty(own.dtype, *own.shape[:2], spec.value_head_dim)
        for run, tables in keys.runs(rows):
            part = slice(run.first_row, run.end_row)
            if run.brings_keys:
                self._attend_with_keys(run, tables, own[part], out[part])
                continue

            def compute(
                peer: int, to: Partials, first: int, step: int, part: slice = part, tables: Tables = tables
            ) -> None:
                pages = self._pages[peer]
                self._kernels.attention_partials(
                    queries[peer][part],
                    pages.keys,
                    pages.values,
                    *tables,
                    *to,
                    spec.score.scale,
                    spec.window,
                    spec.score.softcap,
                    pages.key_scales,
                    pages.value_scales,
                    spec.mask.chunked,
                    first,
                    step,
                )

            keys.attend_in_parts(run, [query.shape[1] for query in queries], compute, out[part], self._sinks)
        return out

    def _attend_with_keys(self, run: SharedRun, tables: Tables, query: Tensor, out: Tensor) -> None:
        """Attend with own heads to all keys of a sequence."""
        places = self._keys.find_places(run, tables, self._pages[0].keys.shape[2])
        of_peers = [[part for part in pages if part is not None] for pages in self._pages]
        pages = KVPages(*(self._keys.bring(part, places) for part in zip(*of_peers, strict=True)))
        self._kernels.paged_attention(
            query,
            pages.keys,
            pages.values,
            *places.tables,
            out,
            self.spec.score.scale,
            self.spec.window,
            self.spec.score.softcap,
            pages.key_scales,
            pages.value_scales,
            self._sinks,
            self.spec.mask.chunked,
        )


class SharedLatentLayer(LatentAttentionLayer):
    """As `LatentAttentionLayer`, for a rank that has the latents of its own splits."""

    def __init__(self, loader: LayerLoader, name: str, spec: MLA, tables: RotaryTables, kv_group: int) -> None:
        super().__init__(loader, name, spec, tables, kv_group)
        stage, linears = loader.stage, spec.projections
        self._keys = keys = SharedKeys(stage, kv_group)
        spans = stage.spans(f"{name}.{'q' if linears.q_norm is None else 'q_up'}.weight")
        self._heads = [spans[peer].size // linears.query_head_dim for peer in keys.peers]
        """Of each peer."""
        self._one = torch.ones(1, device=stage.device)

    def attend_latents(self, query_latent: Tensor, query_rope: Tensor, rows: Rows) -> Tensor:
        """See `LatentAttentionLayer.attend_latents`."""
        keys, cache = self._keys, self._cache
        assert cache is not None
        out = self._kernels.activation_empty(query_latent.dtype, *query_latent.shape)
        for run, tables in keys.runs(rows):
            if not run.brings_keys:
                self._attend_in_parts(run, tables, query_latent, query_rope, out)
                continue
            parts = (cache,) if isinstance(cache, Tensor) else tuple(cache)
            places = keys.find_places(run, tables, parts[0].shape[1])
            # A block is one row, which all peers need.
            brought = [keys.bring([pages[:, None]] * keys.group.size, places)[:, 0] for pages in parts]
            arrived = brought[0] if len(brought) == 1 else QuantizedLatents(*brought)
            part = slice(run.first_row, run.end_row)
            self._kernels.mla_attention(
                query_latent[part], query_rope[part], arrived, *places.tables, out[part], self._spec.score.scale
            )
        return out

    def _attend_in_parts(
        self, run: SharedRun, tables: Tables, query_latent: Tensor, query_rope: Tensor, out: Tensor
    ) -> None:
        """Attend with the heads of all peers to own latents, and merge what all have of own heads into `out`."""
        keys, cache, part = self._keys, self._cache, slice(run.first_row, run.end_row)
        assert cache is not None
        latents, ropes = (self._gather_heads(query[part]) for query in (query_latent, query_rope))

        def compute(peer: int, to: Partials, first: int, step: int) -> None:
            scale = self._spec.score.scale
            self._kernels.mla_partials(latents[peer], ropes[peer], cache, *tables, *to, scale, first, step)

        keys.attend_in_parts(run, self._heads, compute, out[part])

    def _gather_heads(self, query: Tensor) -> list[Tensor]:
        """[R, heads, dim] of each peer."""
        dim = query.shape[2]
        widths = [count * dim for count in self._heads]
        dense = scale_rows(self._kernels, query.flatten(1), self._one)  # a gather needs dense rows
        columns = torch.split(self._keys.group.all_gather_columns(dense, widths), widths, dim=1)
        return [of_peer.view(len(query), -1, dim) for of_peer in columns]


def _partials(pieces: Sequence[Tensor], shape: tuple[int, ...], dim: int) -> Partials:
    """Views [*shape] and [*shape, dim] of pieces that have one row for each of the shape's elements."""
    if len(pieces) == 1:
        [piece] = pieces
        pieces = torch.split(piece.view(-1), [len(piece), len(piece), len(piece) * dim])
    maxima, sums, outputs = pieces
    return Partials(maxima.view(shape), sums.view(shape), outputs.view(*shape, dim))


_COUNTS: dict[tuple[int, tuple[int, ...]], Tensor] = {}
"""All that `_counts` has returned. Unlike a `functools.cache`, it never replaces a tensor that one of two threads has
recorded by that of the other."""


def _counts(num_senders: int, sent: tuple[int, ...]) -> Tensor:
    """[ranks, ranks] int64: what each of the first ranks sends to every rank. Recorded steps keep its address, so there
    is one for the life of the process."""
    known = _COUNTS.get((num_senders, sent))
    if known is not None:
        return known
    counts: npt.NDArray[np.int64] = np.zeros((len(sent), len(sent)), dtype=np.int64)
    counts[:num_senders] = sent
    return _COUNTS.setdefault((num_senders, sent), torch.from_numpy(counts))
