"""Makes a step's tensors in host memory from a plan; all decode steps use the same memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardline import _cpu
from shardline.messages.step import RankStep, SequenceStep
from shardline.runtime.machines.base import StepSizes
from shardline.runtime.sampling.inputs import SamplingInput
from shardline.runtime.sampling.sampler import SamplingPlan
from shardline.runtime.sequences import SequenceTable, WorkerSequence, num_scored
from shardline.runtime.step import KVGroupInput, SampledTokens, ScoredTokens, StepInput

_MAX_SHAPES = 1024
"""Number of decode step shapes that are cached; replicas in lockstep have many combinations of counts."""


class _StepMemory(NamedTuple):
    """The tensors that every StepInput has."""

    token_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    context_lens: Tensor
    kv_groups: tuple[KVGroupInput, ...]


class StepLayout:
    """Lays out the steps of one rank in host memory."""

    def __init__(self, table: SequenceTable, sizes: StepSizes, *, reuses_memory: bool) -> None:
        """`reuses_memory`: whether all decode steps of as many sequences are written to the same memory, where recorded
        programs find them."""
        self._table = table
        self._num_kv_groups = sizes.num_kv_groups
        self._block_size = sizes.block_size
        self._max_seqs = sizes.max_seqs if reuses_memory else 0
        self._decode_memory = self._allocate(self._max_seqs, self._max_seqs, sizes.max_blocks)
        self._decode_step = lru_cache(_MAX_SHAPES)(self._make_decode_step)

    def make_step(self, rank_step: RankStep, sequences: Sequence[WorkerSequence], greedy: bool) -> StepInput:
        """The step of a plan; `sequences` has one sequence for each of the plan's entries."""
        steps = rank_step.plan.steps
        starts, lengths = [entry.start for entry in steps], [entry.num_tokens for entry in steps]
        count = sum(lengths)
        decodes = all(entry.num_tokens == entry.num_samples and not entry.score for entry in steps)
        replicas = rank_step.replica_tokens, rank_step.replica_samples
        if decodes and count <= self._max_seqs:
            step = self._decode_step(len(steps), count, *replicas, greedy)
        else:
            ends = map(int.__add__, starts, lengths)
            memory = self._allocate(count, len(steps), -(-max(ends) // self._block_size))
            step = StepInput(*memory, *replicas, sampled=None, greedy=greedy)
        _cpu.lay_out_tokens(starts, lengths, step.positions, step.query_starts, step.context_lens)
        rows = [sequence.row for sequence in sequences]
        for table, group in zip(self._table.tensors, step.kv_groups, strict=True):
            _cpu.lay_out_blocks(table, rows, starts, lengths, self._block_size, group.block_tables, group.slots)
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
        if decodes:
            return step
        step = dataclasses.replace(step, sampled=_sampled_tokens(step, steps))
        if any(entry.score for entry in steps):
            step = dataclasses.replace(step, scored=_scored_tokens(steps, sequences))
        return step

    def _allocate(self, num_tokens: int, num_seqs: int, num_blocks: int) -> _StepMemory:
        groups = [
            KVGroupInput(
                torch.zeros(num_seqs, num_blocks, dtype=torch.int32), torch.empty(num_tokens, dtype=torch.int64)
            )
            for _ in range(self._num_kv_groups)
        ]
        return _StepMemory(
            token_ids=torch.empty(num_tokens, dtype=torch.int64),
            positions=torch.empty(num_tokens, dtype=torch.int64),
            query_starts=torch.empty(num_seqs + 1, dtype=torch.int32),
            context_lens=torch.empty(num_seqs, dtype=torch.int32),
            kv_groups=tuple(groups),
        )

    def _make_decode_step(
        self,
        num_seqs: int,
        num_tokens: int,
        replica_tokens: tuple[int, ...],
        replica_samples: tuple[int, ...],
        greedy: bool,
    ) -> StepInput:
        """A decode step in the memory that all decode steps share. Drafts have more than one token a sequence."""
        memory = self._decode_memory
        return StepInput(
            token_ids=memory.token_ids[:num_tokens],
            positions=memory.positions[:num_tokens],
            query_starts=memory.query_starts[: num_seqs + 1],
            context_lens=memory.context_lens[:num_seqs],
            kv_groups=tuple(
                KVGroupInput(group.block_tables[:num_seqs], group.slots[:num_tokens]) for group in memory.kv_groups
            ),
            replica_tokens=replica_tokens,
            replica_samples=replica_samples,
            sampled=None,
            greedy=greedy,
            is_replayable=True,
        )


def _sampled_tokens(step: StepInput, steps: Sequence[SequenceStep]) -> SampledTokens:
    """The last tokens of the sampled sequences, and all tokens of the scored ones."""
    counts = torch.tensor([entry.num_samples for entry in steps])
    seqs = counts > 0
    counts = counts[seqs]
    query_starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=query_starts[1:])
    firsts = step.query_starts[1:][seqs] - counts - query_starts[:-1]
    return SampledTokens(
        rows=torch.repeat_interleave(firsts, counts) + torch.arange(int(query_starts[-1])),
        query_starts=query_starts,
        context_lens=step.context_lens[seqs],
        block_tables=tuple(group.block_tables[seqs] for group in step.kv_groups),
    )


def _scored_tokens(steps: Sequence[SequenceStep], sequences: Sequence[WorkerSequence]) -> ScoredTokens:
    """The scored tokens among those of `_sampled_tokens`; those behind the prompt are not scored."""
    rows, targets = [], []
    sampled: list[int] = []
    first = 0
    for entry, sequence in zip(steps, sequences, strict=True):
        if entry.score:
            count = num_scored(entry, sequence)
            rows.append(np.arange(first, first + count))
            targets.append(sequence.tokens[entry.start + 1 : entry.start + 1 + count])
        first += entry.num_samples
        if entry.sample:
            sampled += range(first - (1 + len(entry.draft_token_ids)), first)
    return ScoredTokens(
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(targets)),
        torch.tensor(sampled, dtype=torch.int64),
    )


class _InHostMemory:
    """A download that is over before it begins."""

    is_immediate = True
    is_done = True

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return self._tensors


class HostStepInputs:
    """See `base.StepInputs`: a step is over when its last kernel returns, and the host knows every token."""

    def __init__(self, table: SequenceTable, sizes: StepSizes) -> None:
        self._layout = StepLayout(table, sizes, reuses_memory=True)

    def make_step(
        self,
        rank_step: RankStep,
        sequences: Sequence[WorkerSequence],
        sampling: SamplingPlan | None,
        greedy: bool,
    ) -> StepInput:
        return self._layout.make_step(rank_step, sequences, greedy)

    def keep_tokens(self, sampling: SamplingInput, tokens: Tensor) -> None:
        """Does nothing: the sequence table has the tokens."""

    def download(self, tensors: list[Tensor]) -> _InHostMemory:
        return _InHostMemory(tensors)
