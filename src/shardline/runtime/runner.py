"""StepPlan -> tensors -> forward -> sample -> StepResult, on one rank."""

from __future__ import annotations

import time

import numpy as np
import torch

from shardline.runtime.cuda_graphs import GraphReplay, PaddedStep
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.device import Device, Uploader
from shardline.runtime.finite import FiniteWatch, with_errors
from shardline.runtime.parallel.groups import RankGroups
from shardline.runtime.replay import DecodeReplay, Forward
from shardline.runtime.sampling.sampler import Sampler
from shardline.runtime.sequences import SequenceTable
from shardline.runtime.step import KVGroupInput, StepInput
from shardline.types import RankStep, StepPlan, StepResult


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
        *,
        hidden_size: int,
        dtype: torch.dtype,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        num_kv_groups: int,
        watch: FiniteWatch | None,
        device: Device,
    ) -> None:
        self._stage = stage
        self._groups = groups
        self._sampler = sampler
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._block_size = block_size
        self._num_kv_groups = num_kv_groups
        max_blocks = -(-max_model_len // block_size) + 1
        self._sequences = SequenceTable(num_kv_groups, max_blocks)
        self._watch = watch
        self._forward: Forward = stage.forward
        self._uploader = None if device.is_host else Uploader(device.torch)
        if watch is None:
            sizes = {"max_blocks": max_blocks, "num_kv_groups": num_kv_groups, "hidden_size": hidden_size}
            self._forward = _replay(stage, groups, device, dtype, max_num_seqs, sizes)

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
            result = self._compute(plan, rank_step.replica_tokens, started)
        elif any(rank_step.replica_tokens):
            self._stage.join(rank_step.replica_tokens)
        self._groups.progress.finish(plan.step_id)
        return result if self._sampler is not None else None

    def _compute(self, plan: StepPlan, replica_tokens: tuple[int, ...], started: float) -> StepResult | None:
        step = self._step_input(plan, replica_tokens)
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
        sampled = [entry.seq_id for entry in plan.steps if entry.sample]
        results = self._sampler.sample(output, sampled, self._sequences) if sampled else []
        for result in results:
            for token_id in result.token_ids:
                self._sequences[result.seq_id].append(token_id)
        if errors:
            results = with_errors(results, errors)
        return StepResult(plan.step_id, results, time.perf_counter() - started)

    def _step_input(self, plan: StepPlan, replica_tokens: tuple[int, ...]) -> StepInput:
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
        context_lens = starts + lengths
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
        last_rows = query_starts[1:] - 1
        return StepInput(
            token_ids=torch.from_numpy(np.concatenate(tokens)),
            positions=torch.from_numpy(positions),
            query_starts=torch.from_numpy(query_starts),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            kv_groups=tuple(kv_groups),
            replica_tokens=replica_tokens,
            sample_rows=None if every_token else torch.from_numpy(last_rows[sampled].astype(np.int64)),
        )


def _replay(
    stage: DecoderStage,
    groups: RankGroups,
    device: Device,
    dtype: torch.dtype,
    max_num_seqs: int,
    sizes: dict[str, int],
) -> Forward:
    """The stage's forward pass with decode steps replayed, in the device's way."""
    if device.is_host:
        return DecodeReplay(stage.forward, max_seqs=max_num_seqs, dtype=dtype, **sizes)
    if groups.tensor.size > 1:
        return stage.forward  # an exchange between ranks is not captured
    padded = PaddedStep(device.torch, max_seqs=max_num_seqs, dtype=dtype, **sizes)
    replay = GraphReplay(stage.forward, padded, max_num_seqs)
    with torch.inference_mode():
        replay.capture()
    return replay
