"""Which keys a rank has if several share those of a request, and how the rows of a step then attend."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardline.deployment.deployment import Deployment
from shardline.models.attention import cached_token_bytes
from shardline.models.kv_blocks import SPLIT_TOKENS

_MAX_PLANS = 256
"""Plans that are kept: those of decode steps rarely change."""
_ROWS_PER_EXCHANGE = 16
"""An exchange takes about as long as to send so many rows' results for a split."""


class SharedGroup(NamedTuple):
    """What decides how the layers of a KV group attend."""

    window: int | None
    most_queries: int
    """Keys of a split are more than the results of so many queries."""


class SharedRun(NamedTuple):
    """Consecutive sequences that attend alike to keys that ranks share, see `layers.context_parallel`."""

    first_sequence: int
    end_sequence: int
    first_row: int
    end_row: int
    first_split: int
    num_splits: int
    """Splits that the ranks compute; a multiple of the ranks, if there are more than one for each."""
    brings_keys: bool
    """Whether the keys of the one sequence travel, and not the queries."""

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return self.end_row - self.first_row


class Tables(NamedTuple):
    """Of the sequences of a run, as in `Rows`."""

    blocks: Tensor
    starts: Tensor
    lens: Tensor


class SharedRows(NamedTuple):
    """How the rows attend in the layers of a KV group."""

    runs: tuple[SharedRun, ...]
    tables: tuple[Tables, ...]
    """Of each run. Layers share them, since a back end keeps what it makes of tables that it has seen."""


class KeyShare(NamedTuple):
    """Which keys a rank has."""

    rank: int
    num_ranks: int
    block_size: int
    groups: tuple[SharedGroup, ...]

    def mask_slots(self, slots: Tensor, positions: Tensor) -> None:
        """Let only keys of this rank's splits be stored."""
        owners = positions.numpy() // SPLIT_TOKENS % self.num_ranks
        slots.numpy()[owners != self.rank] = -1

    def plan_rows(self, query_lens: Sequence[int], context_lens: Sequence[int], group: int) -> tuple[SharedRun, ...]:
        """How the sequences of a step attend in the layers of a KV group: consecutive ones together, if that is
        faster."""
        window, most = self.groups[group]
        ends = tuple([-(-length // SPLIT_TOKENS) for length in context_lens])
        if window is None:
            return self._plan(tuple(query_lens), (0,) * len(ends), ends, most)
        unseen = [length - count - window + 1 for count, length in zip(query_lens, context_lens, strict=True)]
        return self._plan(tuple(query_lens), tuple([max(0, keys) // SPLIT_TOKENS for keys in unseen]), ends, most)

    @functools.lru_cache(maxsize=_MAX_PLANS)  # noqa: B019 - a rank has one of these objects
    def _plan(
        self, query_lens: tuple[int, ...], firsts: tuple[int, ...], ends: tuple[int, ...], most_queries: int
    ) -> tuple[SharedRun, ...]:
        """`plan_rows`, for the first split that each sequence sees and the one behind its last."""
        runs: list[SharedRun] = []
        row = 0
        for index, (num_rows, first, end) in enumerate(zip(query_lens, firsts, ends, strict=True)):
            brings_keys = num_rows > most_queries
            if not brings_keys:
                first -= first % self.num_ranks  # so that the first split is of the first rank
            num_splits = self._round(end - first)
            run = SharedRun(index, index + 1, row, row + num_rows, first, num_splits, brings_keys)
            joined = self._join(runs[-1], run) if runs else None
            if joined is not None:
                runs[-1] = joined
            else:
                runs.append(run)
            row += num_rows
        return tuple(runs)

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


def share_keys(deployment: Deployment, rank: int, num_ranks: int) -> KeyShare:
    """Which keys one of the ranks of a context group has."""
    cache, layers = deployment.cache, deployment.spec.layers
    kinds = []
    for kv_group in cache.groups:
        attention = layers[kv_group.layers[0]].attention
        keys = SPLIT_TOKENS * cached_token_bytes(attention, 1, cache.dtype)
        if attention.shares_cache:  # each rank would get all of them, for its own heads
            keys *= deployment.grid.sharing
        most = int(keys / (4 * attention.partial_size))
        kinds.append(SharedGroup(kv_group.window, most))
    return KeyShare(rank, num_ranks, cache.block_size, tuple(kinds))


def share_rows(
    plan: Sequence[tuple[SharedRun, ...]],
    query_lens: Sequence[int],
    block_tables: Sequence[Tensor],
    context_lens: Tensor,
    memory: Tensor | None = None,
) -> tuple[SharedRows, ...]:
    """The plan of each KV group with the tables of each run. Its query starts are written to `memory` [num_groups, at
    least twice the number of sequences] int32: those of run i begin at its first sequence's number + i."""
    shared = []
    if memory is None:
        memory = torch.empty(len(plan), 2 * len(query_lens), dtype=torch.int32)
    for runs, blocks, of_group in zip(plan, block_tables, memory, strict=True):
        tables = []
        for number, run in enumerate(runs):
            sequences = slice(run.first_sequence, run.end_sequence)
            starts = of_group[run.first_sequence + number : run.end_sequence + number + 1]
            starts[0] = 0
            np.cumsum(query_lens[sequences], out=starts.numpy()[1:])
            tables.append(Tables(blocks[sequences], starts, context_lens[sequences]))
        shared.append(SharedRows(runs, tuple(tables)))
    return tuple(shared)
