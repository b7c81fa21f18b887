"""StepPlan -> tensors -> forward -> sample -> StepResult, on one rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shardline.runtime.decoder import DecoderStage
from shardline.runtime.device import Device, Uploader
from shardline.runtime.finite import FiniteWatch, with_errors
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.replay import Forward
from shardline.runtime.sampling.sampler import Sampler
from shardline.runtime.sequences import SequenceTable
from shardline.runtime.step import KVGroupInput, SampledTokens, StepInput
from shardline.types import RankStep, StepResult


class Runner:
    """Runs the steps of one rank, in the order they were planned.

    Every rank keeps the tokens of all its sequences; those of the last stage append what they sample themselves, so
    that the next plan may name a token that the engine does not know yet.
    """

    def __init__(
        self,
        stage: DecoderStage,
        groups: RankGroups,
        sampler: Sampler | None,
        forward: Forward,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        block_size: int,
        max_blocks: int,
        num_kv_groups: int,
        watch: FiniteWatch | None,
        device: Device,
    ) -> None:
        """`forward`: the stage's, or what replays it; `max_blocks`: of the longest sequence."""
        self._stage = stage
        self._groups = groups
        self._sampler = sampler
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._block_size = block_size
        self._num_kv_groups = num_kv_groups
        self._sequences = SequenceTable(num_kv_groups, max_blocks)
        self._watch = watch
        # Elsewhere steps are captured with all logits, and whoever looks for NaN looks at all.
        self._finds_best = device.is_host and watch is None and stage.lm_head is not None and stage.lm_head.finds_best
        self._forward = forward
        self._uploader = None if device.is_host else Uploader(device.torch)

    @torch.inference_mode()
    def run(self, rank_step: RankStep) -> StepResult | None:
        """Run one step. The last stage's ranks return what was sampled, the others None."""
        started = time.perf_counter()
        plan = rank_step.plan
        for seq_id in plan.ends:
            self._sequences.end(seq_id)
        for start in plan.starts:
            self._sequences.start(start)
        result: StepResult | None = StepResult(plan.step_id, [])
        if plan.steps:
            result = self._compute(rank_step, started)
        elif any(rank_step.replica_tokens):
            self._stage.join(rank_step.replica_tokens, rank_step.replica_samples)
        self._groups.progress.finish(plan.step_id)
        return result if self._sampler is not None else None

    def _compute(self, rank_step: RankStep, started: float) -> StepResult | None:
        plan = rank_step.plan
        step = self._step_input(rank_step)
        sampled = [entry.seq_id for entry in plan.steps if entry.sample]
        if self._finds_best and self._sampler is not None and self._sampler.is_greedy(sampled, self._sequences):
            step = dataclasses.replace(step, greedy=True)
        if self._uploader is not None:
            step = self._uploader.upload(step)
        if self._groups.from_previous is None:
            hidden = self._stage.embed(step)
        else:
            hidden = self._groups.from_previous.receive((plan.num_tokens, self._hidden_size), self._dtype)
        output = self._forward(step, hidden)
        if self._groups.to_next is not None:
            self._groups.to_next.send(output)
        errors = self._watch.report(plan) if self._watch is not None else {}
        if self._sampler is None:
            return None
        if step.greedy:
            results = self._sampler.choose(output, sampled)
        else:
            results = self._sampler.sample(output, sampled, self._sequences) if sampled else []
        for result in results:
            for token_id in result.token_ids:
                self._sequences[result.seq_id].append(token_id)
        if errors:
            results = with_errors(results, errors)
        return StepResult(plan.step_id, results, time.perf_counter() - started)

    def _step_input(self, rank_step: RankStep) -> StepInput:
        plan = rank_step.plan
        num_seqs = len(plan.steps)
        rows = np.empty(num_seqs, dtype=np.int64)
        starts = np.empty(num_seqs, dtype=np.int64)
        lengths = np.empty(num_seqs, dtype=np.int64)
        tokens = []
        for index, entry in enumerate(plan.steps):
            sequence = self._sequences.advance(entry)
            rows[index], starts[index], lengths[index] = sequence.row, entry.start, entry.num_tokens
            tokens.append(sequence.tokens[entry.start : entry.start + entry.num_tokens])
        query_starts = np.zeros(num_seqs + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        context_lens = (starts + lengths).astype(np.int32)
        owners = np.repeat(np.arange(num_seqs), lengths)
        positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, lengths)
        max_blocks = -(-int(context_lens.max()) // self._block_size)
        kv_groups = []
        for group in range(self._num_kv_groups):
            tables = self._sequences.block_tables(group, rows, max_blocks)
            blocks = tables[owners, positions // self._block_size].astype(np.int64)
            slots = blocks * self._block_size + positions % self._block_size
            kv_groups.append(KVGroupInput(torch.from_numpy(tables), torch.from_numpy(slots)))
        sampled = np.array([entry.sample for entry in plan.steps], dtype=bool)
        every_token = num_seqs == len(positions) and sampled.all()
        return StepInput(
            token_ids=torch.from_numpy(np.concatenate(tokens)),
            positions=torch.from_numpy(positions),
            query_starts=torch.from_numpy(query_starts),
            context_lens=torch.from_numpy(context_lens),
            kv_groups=tuple(kv_groups),
            replica_tokens=rank_step.replica_tokens,
            replica_samples=rank_step.replica_samples,
            sampled=None if every_token else _sampled_tokens(sampled, query_starts, context_lens, kv_groups),
        )


def _sampled_tokens(
    sampled: NDArray[np.bool_],
    query_starts: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    kv_groups: Sequence[KVGroupInput],
) -> SampledTokens:
    """The last tokens of the sequences that are `sampled`."""
    seqs = torch.from_numpy(sampled)
    return SampledTokens(
        rows=torch.from_numpy((query_starts[1:] - 1)[sampled].astype(np.int64)),
        query_starts=torch.arange(int(sampled.sum()) + 1, dtype=torch.int32),
        context_lens=torch.from_numpy(context_lens[sampled]),
        block_tables=tuple(group.block_tables[seqs] for group in kv_groups),
    )
