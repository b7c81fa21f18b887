"""Attention whose keys and values several ranks share: split i of a request's keys is of rank i % C.

The ranks of a context group share the heads of each layer, as tensor-parallel ranks do. Where a sequence attends,
either its queries travel or its keys do, whichever is less. If queries travel, each rank computes all heads for its
own splits, and sends each rank what it has computed of that rank's heads: (m, l, o) of each split in float32. If
keys travel, as in prefill, each rank gets those of its own heads and computes them as if it had stored them. The bits
are those of one rank either way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.deployment.deployment import Deployment
from shardline.kernels.tensors import LinearInput
from shardline.models.attention import GQA, cached_token_bytes
from shardline.models.kv_groups import SPLIT_TOKENS
from shardline.models.parts import KVDType, KVPart
from shardline.runtime.layers.attention import AttentionLayer, RotaryTables
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.kv_pages import KVPages
from shardline.runtime.ops.attention.paged import Partials
from shardline.runtime.parallel.collectives import Collectives
from shardline.runtime.step import Rows, SharedRows, SharedRun

_ROWS_PER_EXCHANGE = 16
"""An exchange takes about as long as to send so many rows' results for a split."""


class SharedGroup(NamedTuple):
    """What decides how the layers of a KV group attend."""

    window: int | None
    most_queries: int
    """Keys of a split are more than the results of so many queries."""


class KeyShare(NamedTuple):
    """Which keys a rank has."""

    rank: int
    num_ranks: int
    block_size: int
    groups: tuple[SharedGroup, ...]

    def mask_slots(self, slots: Tensor, positions: Tensor) -> None:
        """Let only keys of this rank's splits be stored."""
        slots.masked_fill_(positions // SPLIT_TOKENS % self.num_ranks != self.rank, -1)

    def plan_rows(self, query_lens: Sequence[int], context_lens: Sequence[int], group: int) -> tuple[SharedRun, ...]:
        """How the sequences of a step attend in the layers of a KV group: consecutive ones together, if that is
        faster."""
        runs: list[SharedRun] = []
        row = 0
        for index, (num_rows, length) in enumerate(zip(query_lens, context_lens, strict=True)):
            run = self._run_of(index, row, num_rows, length, self.groups[group])
            joined = self._join(runs[-1], run) if runs else None
            if joined is not None:
                runs[-1] = joined
            else:
                runs.append(run)
            row += num_rows
        return tuple(runs)

    def _run_of(self, sequence: int, row: int, num_rows: int, length: int, group: SharedGroup) -> SharedRun:
        first_key = 0 if group.window is None else max(0, length - num_rows - group.window + 1)
        first = first_key // SPLIT_TOKENS
        brings_keys = num_rows > group.most_queries
        if not brings_keys:
            first -= first % self.num_ranks  # so that the first split is of the first rank
        num_splits = -(-length // SPLIT_TOKENS) - first
        return SharedRun(sequence, sequence + 1, row, row + num_rows, first, self._round(num_splits), brings_keys)

    def _round(self, num_splits: int) -> int:
        """A few more splits, of which no row sees a key, so that there are fewer kinds of runs."""
        if num_splits <= self.num_ranks:
            return num_splits
        each = -(-num_splits // self.num_ranks)
        unit = 1 << max(0, each.bit_length() - 3)
        return -(-each // unit) * unit * self.num_ranks

    def _join(self, before: SharedRun, run: SharedRun) -> SharedRun | None:
        """Two runs as one; None: that would be slower."""
        if before.brings_keys or run.brings_keys:
            return None
        first = min(before.first_split, run.first_split)
        end = max(before.first_split + before.num_splits, run.first_split + run.num_splits)
        joined = SharedRun(
            before.first_sequence,
            run.end_sequence,
            before.first_row,
            run.end_row,
            first,
            self._round(end - first),
            False,
        )
        more = joined.num_rows * joined.num_splits - sum(one.num_rows * one.num_splits for one in (before, run))
        return joined if more <= _ROWS_PER_EXCHANGE * self.num_ranks else None


def share_keys(deployment: Deployment, group: Collectives) -> KeyShare:
    """Which keys a rank of a context group has."""
    cache, layers = deployment.cache, deployment.spec.layers
    kinds = []
    for kv_group in cache.groups:
        attention = layers[kv_group.layers[0]].attention
        keys = SPLIT_TOKENS * cached_token_bytes(attention, 1, cache.dtype)
        kinds.append(SharedGroup(kv_group.window, int(keys / (4 * attention.partial_size))))
    return KeyShare(group.rank, group.size, cache.block_size, tuple(kinds))


def share_rows(
    plan: Sequence[tuple[SharedRun, ...]], query_lens: Sequence[int], memory: Tensor
) -> tuple[SharedRows, ...]:
    """The plan of each KV group with the query starts of each run, which are written to `memory` [num_groups, at least
    twice the number of sequences] int32."""
    shared = []
    for runs, of_group in zip(plan, memory, strict=True):
        starts = of_group.numpy()
        for number, run in enumerate(runs):
            place = run.first_sequence + number
            starts[place] = 0
            lens = query_lens[run.first_sequence : run.end_sequence]
            np.cumsum(lens, out=starts[place + 1 : place + 1 + len(lens)])
        shared.append(SharedRows(runs, of_group))
    return tuple(shared)


class SharedAttentionLayer(AttentionLayer):
    """As `AttentionLayer`, for a rank that has keys and values of its own splits, of all heads of its context group."""

    def __init__(self, loader: LayerLoader, name: str, spec: GQA, tables: RotaryTables, kv_group: int) -> None:
        super().__init__(loader, name, spec, tables, kv_group)
        stage = loader.stage
        self._group = stage.context_group
        self._num_sharing, self._own_share = stage.group.size, stage.group.rank
        first = stage.group.rank - self._group.rank
        peers = range(first, first + self._group.size)
        spans = [stage.spans(f"{name}.{part}.weight") for part in self.parts]
        self._widths = [sum(span[peer].size for span in spans) for peer in peers]
        self._heads = [self.count_heads([span[peer].size for span in spans]) for peer in peers]
        """Of each peer, as `num_heads`."""
        kv_spans = spec.kv_spans_of(stage.group.size)[first : first + self._group.size]
        distinct = list(dict.fromkeys(kv_spans))
        self._place_of = [distinct.index(span) for span in kv_spans]
        """Which of the pages have the KV heads of each peer."""
        self._pages: list[KVPages] = []

    def cache_parts(self, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """The tensors that `bind_cache` expects: those of each peer's KV heads, one after another."""
        ranks, context, rank = self._num_sharing, self._group.size, self._own_share
        held = self.spec.kv_heads_held(ranks, context, rank)
        return tuple(part for heads in held for part in self.spec.kv_parts(heads, num_blocks, block_size, dtype))

    def bind_cache(self, *pages: Tensor) -> None:
        """Give the layer the memory for its keys and values."""
        each = len(pages) // (1 + max(self._place_of))
        of_heads = [KVPages(*pages[first : first + each]) for first in range(0, len(pages), each)]
        self._pages = [of_heads[place] for place in self._place_of]

    def __call__(self, x: LinearInput, rows: Rows, left: Rows) -> Tensor:
        qkv = self._group.all_gather_columns(self.qkv(x, rows), self._widths)
        columns = torch.split(qkv, self._widths, dim=1)
        queries = [self.store_in(*of_peer, rows) for of_peer in zip(columns, self._heads, self._pages, strict=True)]
        if left is not rows:
            queries = [left.take(query) for query in queries]
        return self.output(self._attend(queries, left).flatten(1), left)

    def _attend(self, queries: Sequence[Tensor], rows: Rows) -> Tensor:
        """The attention output [Q, local heads, head_dim], for the queries of each peer."""
        assert rows.shared is not None
        own, (runs, starts) = queries[self._group.rank], rows.shared[self.kv_group]
        out = self._kernels.activation_empty(own.dtype, *own.shape[:2], self.spec.value_head_dim)
        for number, run in enumerate(runs):
            place = run.first_sequence + number
            index = (
                rows.block_tables[self.kv_group][run.first_sequence : run.end_sequence],
                starts[place : place + run.end_sequence - run.first_sequence + 1],
                rows.context_lens[run.first_sequence : run.end_sequence],
            )
            part = slice(run.first_row, run.end_row)
            if run.brings_keys:
                self._attend_with_keys(run, own[part], *index, out[part])
            else:
                self._attend_in_parts(run, [query[part] for query in queries], *index, out[part])
        return out

    def _attend_in_parts(
        self, run: SharedRun, queries: Sequence[Tensor], tables: Tensor, starts: Tensor, lens: Tensor, out: Tensor
    ) -> None:
        """Attend to own splits, and merge what each rank has of own heads."""
        group, kernels, dim = self._group, self._kernels, self.spec.value_head_dim
        # Ranks that have none of few splits take no part.
        num_ranks = min(group.size, run.num_splits)
        shape = run.num_splits // num_ranks, run.num_rows
        heads = [query.shape[1] for query in queries]
        sent = [shape[0] * shape[1] * count for count in heads] if group.rank < num_ranks else [0] * group.size
        widths = (1, 1, dim)
        parts = [kernels.activation_empty(torch.float32, sum(sent), width) for width in widths]
        at = 0
        for query, pages, count in zip(queries, self._pages, sent, strict=True):
            if count == 0:
                continue
            maxima, sums, outputs = (part[at : at + count] for part in parts)
            at += count
            kernels.attention_partials(
                query,
                pages.keys,
                pages.values,
                tables,
                starts,
                lens,
                maxima.view(*shape, -1),
                sums.view(*shape, -1),
                outputs.view(*shape, -1, dim),
                self.spec.score.scale,
                self.spec.window,
                self.spec.score.softcap,
                pages.key_scales,
                pages.value_scales,
                self.spec.mask.chunked,
                run.first_split + group.rank,
                group.size,
            )
        counts = _counts(num_ranks, tuple(shape[0] * shape[1] * count for count in heads))
        own = heads[group.rank]
        capacity = num_ranks * shape[0] * shape[1] * own
        maxima, sums, outputs = (group.all_to_all_rows(part, counts, capacity) for part in parts)
        received = Partials(
            maxima.view(num_ranks, *shape, own),
            sums.view(num_ranks, *shape, own),
            outputs.view(num_ranks, *shape, own, dim),
        )
        kernels.merge_partials(*received, out, self._sinks)

    def _attend_with_keys(
        self, run: SharedRun, query: Tensor, tables: Tensor, starts: Tensor, lens: Tensor, out: Tensor
    ) -> None:
        """Attend with own heads to all keys of a sequence, which the ranks send each other."""
        group, block_size = self._group, self._pages[0].keys.shape[2]
        table = tables[0].numpy()
        places = np.arange(run.first_split * SPLIT_TOKENS // block_size, -(-int(lens[0]) // block_size))
        owners = places * block_size // SPLIT_TOKENS % group.size
        own_blocks = torch.from_numpy(table[places[owners == group.rank]])
        num_sent = np.bincount(owners, minlength=group.size)
        heads = [pages.keys.shape[1] for pages in self._pages]
        counts = torch.from_numpy(np.outer(num_sent, heads))
        brought = []
        for tensors in zip(*self._pages, strict=True):
            if tensors[0] is None:
                break
            brought.append(self._bring(tensors, own_blocks, counts, len(places)))
        pages = KVPages(*brought)
        order = np.empty(len(places), dtype=np.int32)
        order[np.argsort(owners, kind="stable")] = np.arange(len(places), dtype=np.int32)
        arrived = np.zeros((1, places[-1] + 1), dtype=np.int32)
        arrived[0, places] = order
        self._kernels.paged_attention(
            query,
            pages.keys,
            pages.values,
            torch.from_numpy(arrived),
            starts,
            lens,
            out,
            self.spec.score.scale,
            self.spec.window,
            self.spec.score.softcap,
            pages.key_scales,
            pages.value_scales,
            self._sinks,
            self.spec.mask.chunked,
        )

    def _bring(self, of_peers: Sequence[Tensor], own_blocks: Tensor, counts: Tensor, num_blocks: int) -> Tensor:
        """The blocks of a sequence, [num_blocks, own KV heads, ...], those of the first rank's splits first; `of_peers`
        has the pages of each peer's heads."""
        own = of_peers[self._group.rank]
        shape, row = (num_blocks, *own.shape[1:]), own[0, 0].numel()
        as_stored = own.dtype
        if as_stored.itemsize == 1:
            of_peers = [pages.view(torch.int8) for pages in of_peers]
        sent = torch.cat([torch.index_select(pages, 0, own_blocks).view(-1, row) for pages in of_peers])
        rows = self._group.all_to_all_rows(sent, counts, num_blocks * own.shape[1])
        return rows.view(as_stored).view(shape)


@functools.cache
def _counts(num_senders: int, sent: tuple[int, ...]) -> Tensor:
    """[ranks, ranks] int64: what each of the first ranks sends to every rank. Recorded steps keep it."""
    counts: npt.NDArray[np.int64] = np.zeros((len(sent), len(sent)), dtype=np.int64)
    counts[:num_senders] = sent
    return torch.from_numpy(counts)
