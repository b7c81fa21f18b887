"""From a plan to a step's tensors. On the host, decode steps lie in memory that stays, where programs find them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.sequences import Sequence, SequenceTable
from shardline.runtime.step import KVGroupInput, SampledTokens, StepInput
from shardline.types import RankStep, SequenceStep

_MAX_SHAPES = 1024
"""Of decode steps that are remembered; replicas in lockstep have many combinations of counts."""


class _Memory(NamedTuple):
    """The tensors of StepInput that every step has."""

    token_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    context_lens: Tensor
    kv_groups: tuple[KVGroupInput, ...]


class StepInputs:
    """The inputs of one rank's steps."""

    def __init__(
        self, table: SequenceTable, *, num_kv_groups: int, block_size: int, max_blocks: int, max_seqs: int, stays: bool
    ) -> None:
        """`max_blocks`: of the longest sequence; `stays`: whether decode steps get memory that does not move, which
        the next of them writes over."""
        self._table = table
        self._num_kv_groups = num_kv_groups
        self._block_size = block_size
        self._max_seqs = max_seqs if stays else 0
        self._stays = self._memory(self._max_seqs, self._max_seqs, max_blocks)
        self._kept = lru_cache(_MAX_SHAPES)(self._keep)

    def make(self, rank_step: RankStep, sequences: Rows[Sequence], greedy: bool) -> StepInput:
        """The step of a plan that has one, of `sequences`, one for each of its entries."""
        steps = rank_step.plan.steps
        starts, lengths = [entry.start for entry in steps], [entry.num_tokens for entry in steps]
        decodes = all(entry.num_tokens == 1 and entry.sample for entry in steps)
        replicas = rank_step.replica_tokens, rank_step.replica_samples
        if decodes and len(steps) <= self._max_seqs:
            step = self._kept(len(steps), *replicas, greedy)
        else:
            ends = map(int.__add__, starts, lengths)
            memory = self._memory(sum(lengths), len(steps), -(-max(ends) // self._block_size))
            step = StepInput(*memory, *replicas, sampled=None, greedy=greedy)
        _cpu.lay_out_tokens(starts, lengths, step.positions, step.query_starts, step.context_lens)
        rows = [sequence.row for sequence in sequences]
        for table, group in zip(self._table.tensors, step.kv_groups, strict=True):
            _cpu.lay_out_blocks(table, rows, starts, lengths, self._block_size, group.block_tables, group.slots)
        if decodes:
            step.token_ids.numpy()[:] = [
                sequence.tokens[start] for sequence, start in zip(sequences, starts, strict=True)
            ]
            return step
        tokens = [
            sequence.tokens[start : start + length]
            for sequence, start, length in zip(sequences, starts, lengths, strict=True)
        ]
        np.concatenate(tokens, out=step.token_ids.numpy())
        return dataclasses.replace(step, sampled=_sampled_tokens(step, steps))

    def _memory(self, num_tokens: int, num_seqs: int, num_blocks: int) -> _Memory:
        groups = [
            KVGroupInput(
                torch.zeros(num_seqs, num_blocks, dtype=torch.int32), torch.empty(num_tokens, dtype=torch.int64)
            )
            for _ in range(self._num_kv_groups)
        ]
        return _Memory(
            token_ids=torch.empty(num_tokens, dtype=torch.int64),
            positions=torch.empty(num_tokens, dtype=torch.int64),
            query_starts=torch.empty(num_seqs + 1, dtype=torch.int32),
            context_lens=torch.empty(num_seqs, dtype=torch.int32),
            kv_groups=tuple(groups),
        )

    def _keep(
        self, count: int, replica_tokens: tuple[int, ...], replica_samples: tuple[int, ...], greedy: bool
    ) -> StepInput:
        """A decode step of `count` sequences, in the memory of them all."""
        memory = self._stays
        return StepInput(
            token_ids=memory.token_ids[:count],
            positions=memory.positions[:count],
            query_starts=memory.query_starts[: count + 1],
            context_lens=memory.context_lens[:count],
            kv_groups=tuple(
                KVGroupInput(group.block_tables[:count], group.slots[:count]) for group in memory.kv_groups
            ),
            replica_tokens=replica_tokens,
            replica_samples=replica_samples,
            sampled=None,
            greedy=greedy,
            stays=True,
        )


def _sampled_tokens(step: StepInput, steps: Rows[SequenceStep]) -> SampledTokens:
    """The last tokens of the sequences that are sampled."""
    seqs = torch.tensor([entry.sample for entry in steps])
    return SampledTokens(
        rows=(step.query_starts[1:] - 1)[seqs].long(),
        query_starts=torch.arange(int(seqs.sum()) + 1, dtype=torch.int32),
        context_lens=step.context_lens[seqs],
        block_tables=tuple(group.block_tables[seqs] for group in step.kv_groups),
    )
