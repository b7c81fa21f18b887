"""Lays out a step's tokens in host memory from a plan; all decode steps may use the same memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from shardline import _cpu
from shardline.messages.step import RankStep, SequenceStep
from shardline.runtime.features.scores import scored_rows
from shardline.runtime.machines.base import BlockTables, StepSizes
from shardline.runtime.machines.host.step_sharing import StepSharing
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import Rows, ScoredRows, StepInput

_MAX_SHAPES = 1024
"""Number of decode step shapes that are cached; replicas in lockstep have many combinations of counts."""
_MAX_SHORT = 32
"""Tokens of a prompt that is replayed if it is alone in a step. Python takes longer than those of a small model."""


class StepLayout:
    """Lays out the steps of one rank in host memory."""

    def __init__(self, table: BlockTables, sizes: StepSizes, *, reuses_memory: bool) -> None:
        """`reuses_memory`: whether all decode steps of as many sequences are written to the same memory, where recorded
        programs find them."""
        self._table = table
        self._num_kv_groups = sizes.num_kv_groups
        self._block_size = sizes.block_size
        self._max_seqs = sizes.max_seqs if reuses_memory else 0
        self._keeps_states = sizes.keeps_states
        self._sharing: StepSharing | None = None
        if sizes.share is not None:
            self._sharing = StepSharing(sizes.share, sizes.num_kv_groups, self._max_seqs)
        memory = self._allocate(self._max_seqs, self._max_seqs, sizes.max_blocks, ())
        self._decode_step = lru_cache(_MAX_SHAPES)(partial(_decode_step, *memory))

    def make_step(self, rank_step: RankStep, sequences: Sequence[WorkerSequence], greedy: bool) -> StepInput:
        """The step of a plan; `sequences` has one sequence for each of the plan's entries."""
        steps = rank_step.plan.steps
        starts, lengths = [entry.start for entry in steps], [entry.num_tokens for entry in steps]
        count = sum(lengths)
        decodes = all(entry.num_tokens == entry.num_samples and not entry.score for entry in steps)
        is_short = len(steps) == len(rank_step.replica_tokens) == steps[0].num_samples == 1 < count <= _MAX_SHORT
        is_short = is_short and not steps[0].score and self._sharing is None
        reuses = (decodes or is_short) and count <= self._max_seqs
        if reuses:
            replicas = rank_step.replica_tokens, rank_step.replica_samples
            step = self._decode_step(len(steps), count, *replicas, greedy, is_short)
        else:
            ends = map(int.__add__, starts, lengths)
            token_ids, rows = self._allocate(
                count, len(steps), -(-max(ends) // self._block_size), rank_step.replica_tokens
            )
            step = StepInput(token_ids, _as_sampled(rows, rank_step.replica_samples), greedy)
        rows = step.rows
        _cpu.lay_out_tokens(starts, lengths, rows.positions, rows.query_starts, rows.context_lens)
        places = [sequence.row for sequence in sequences]
        if rows.states is not None:
            rows.states.numpy()[:] = places
        for table, tables, slots in zip(self._table.tensors, rows.block_tables, rows.slots, strict=True):
            _cpu.lay_out_blocks(table, places, starts, lengths, self._block_size, tables, slots)
        if self._sharing is not None:
            step = self._sharing.share_step(step, lengths)
            rows = step.rows
        if decodes and count == len(steps):
            step.token_ids.numpy()[:] = [
                sequence.tokens[start] for sequence, start in zip(sequences, starts, strict=True)
            ]
            return step
        tokens = [
            sequence.tokens[start : start + length]
            for sequence, start, length in zip(sequences, starts, lengths, strict=True)
        ]
        np.concatenate(tokens, out=step.token_ids.numpy())
        if decodes or reuses:
            return step
        scored = scored_rows(steps, sequences) if any(entry.score for entry in steps) else None
        narrowed = _narrowed(rows, steps, rank_step.replica_samples, scored)
        if self._sharing is not None:
            counts = [entry.num_samples for entry in steps if entry.num_samples]
            narrowed = self._sharing.share_narrowed(narrowed, counts)
        return dataclasses.replace(step, rows=dataclasses.replace(rows, narrowed=narrowed))

    def _allocate(
        self, num_tokens: int, num_seqs: int, num_blocks: int, replicas: tuple[int, ...]
    ) -> tuple[Tensor, Rows]:
        """Memory for token ids, and a table of these tokens."""
        groups = range(self._num_kv_groups)
        rows = Rows(
            positions=torch.empty(num_tokens, dtype=torch.int64),
            query_starts=torch.empty(num_seqs + 1, dtype=torch.int32),
            context_lens=torch.empty(num_seqs, dtype=torch.int32),
            block_tables=tuple(torch.zeros(num_seqs, num_blocks, dtype=torch.int32) for _ in groups),
            slots=tuple(torch.empty(num_tokens, dtype=torch.int64) for _ in groups),
            replicas=replicas,
            states=torch.empty(num_seqs, dtype=torch.int32) if self._keeps_states else None,
        )
        return torch.empty(num_tokens, dtype=torch.int64), rows


def _decode_step(
    token_ids: Tensor,
    table: Rows,
    num_seqs: int,
    num_tokens: int,
    replica_tokens: tuple[int, ...],
    replica_samples: tuple[int, ...],
    greedy: bool,
    samples_last: bool,
) -> StepInput:
    """A decode step in the memory that all decode steps share. Drafts have more than one token a sequence.

    `token_ids`, `table`: this memory. `samples_last`: it is a short prompt of one sequence, whose last row goes on.
    """
    rows = Rows(
        positions=table.positions[:num_tokens],
        query_starts=table.query_starts[: num_seqs + 1],
        context_lens=table.context_lens[:num_seqs],
        block_tables=tuple(tables[:num_seqs] for tables in table.block_tables),
        slots=tuple(slots[:num_tokens] for slots in table.slots),
        replicas=replica_tokens,
        states=None if table.states is None else table.states[:num_seqs],
    )
    rows = _as_sampled(rows, replica_samples)
    if samples_last:
        narrowed = dataclasses.replace(
            rows,
            positions=rows.positions[-1:],
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            slots=(),
            replicas=replica_samples,
            narrowed=None,
            places=torch.tensor([num_tokens - 1]),
            are_last=True,
        )
        rows = dataclasses.replace(rows, narrowed=narrowed)
    return StepInput(token_ids[:num_tokens], rows, greedy, is_replayable=True)


def _as_sampled(rows: Rows, replica_samples: tuple[int, ...]) -> Rows:
    """A table of all tokens, as if all of them were sampled; perhaps not all tokens of other replicas are."""
    if replica_samples == rows.replicas:
        return rows
    return dataclasses.replace(rows, narrowed=dataclasses.replace(rows, replicas=replica_samples))


def _narrowed(
    rows: Rows, steps: Sequence[SequenceStep], replica_samples: tuple[int, ...], scored: ScoredRows | None
) -> Rows:
    """The last tokens of the sampled sequences, and all tokens of the scored ones."""
    samples = np.array([entry.num_samples for entry in steps])
    seqs = np.flatnonzero(samples)
    counts = samples[seqs]
    query_starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    firsts = rows.query_starts.numpy()[1:][seqs] - counts - query_starts[:-1]
    places = np.repeat(firsts, counts) + np.arange(query_starts[-1])
    return Rows(
        positions=torch.from_numpy(rows.positions.numpy()[places]),
        query_starts=torch.from_numpy(query_starts),
        context_lens=torch.from_numpy(rows.context_lens.numpy()[seqs]),
        block_tables=tuple(torch.from_numpy(tables.numpy()[seqs]) for tables in rows.block_tables),
        slots=(),
        replicas=replica_samples,
        places=torch.from_numpy(places),
        scored=scored,
    )
