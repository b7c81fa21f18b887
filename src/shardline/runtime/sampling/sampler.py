"""From logits to tokens. Every rank of the last stage samples every row; equal bits give equal tokens.

Sampling has three steps, so that the host need not wait for a device. `plan_sampling` collects on the host what the
rows ask for, `sample_tokens` chooses tokens on the device of the logits, and `make_results` reads the outcome once it
is in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardline.config.engine import LogprobsMode
from shardline.kernels.contract import Kernels
from shardline.messages.step import SequenceResult
from shardline.models.partition import Span
from shardline.runtime.ops.sampling.mask import TokenMasks, mask_tokens_
from shardline.runtime.ops.sampling.penalties import penalize_
from shardline.runtime.ops.sampling.sample import find_best, greedy_argmax, sample
from shardline.runtime.parallel.collectives import Collectives
from shardline.runtime.sampling.adjustments import penalties_of
from shardline.runtime.sampling.inputs import Draws, SamplingInput
from shardline.runtime.sampling.reports import Reports, Wanted, processed_logits, read_reports, report
from shardline.runtime.sequences import WorkerSequence


@dataclass(frozen=True)
class SamplingPlan:
    """What the sampled rows of a step ask for, one entry per row."""

    seq_ids: list[int]
    wanted: list[Wanted | None]
    """What to report beside each token; None: nothing."""
    inputs: SamplingInput
    """The inputs of `sample_tokens`, in host memory."""

    @property
    def is_greedy(self) -> bool:
        """Whether only the largest allowed logit of each row is needed, so that `choose_best` suffices."""
        return self.inputs.draws is None


class Sampled(NamedTuple):
    """The outcome of a step's rows; tensors are on the device of the logits."""

    tokens: Tensor
    """[R] int64 or int32"""
    reports: Reports | None = None

    def list_tensors(self) -> list[Tensor]:
        """All tensors, to be copied."""
        return [self.tokens, *(self.reports.list_tensors() if self.reports is not None else ())]

    def from_copies(self, tensors: Sequence[Tensor]) -> Sampled:
        """The same with copies of the tensors, in the order of `list_tensors`."""
        tokens, *reported = tensors
        return Sampled(tokens, Reports.from_copies(reported) if reported else None)


class Sampler:
    """Chooses the next token of each row of vocab-parallel logits.

    A token depends only on its row, the request's parameters and the counter-based random number of (seed, choice,
    position), never on other rows.
    """

    def __init__(
        self,
        kernels: Kernels,
        spans: Sequence[Span],
        group: Collectives,
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        """`spans`: the vocabulary range of each rank of `group`; `device`: the device of the logits.

        `logprobs_mode`: what is reported; raw: before penalties, masks, temperature and filters, processed: after them.
        """
        self._is_processed = logprobs_mode.startswith("processed")
        self._as_logits = logprobs_mode.endswith("logits")
        self._kernels = kernels
        self._widths = [span.size for span in spans]
        self._group = group
        self._first = torch.tensor([span.start for span in spans], device=device)

    def choose_best(self, best: Tensor) -> Sampled:
        """The largest logit of each row over all ranks. `best` [R, 2]: the best of each row on this rank, as
        `PackedLinear.argmax` returns it. The lowest id wins ties, because spans are in rank order."""
        if self._group.size == 1:
            return Sampled(best.view(torch.int32)[:, 1].clone())  # a draft model's steps need the memory of `best`
        gathered = self._group.all_gather_columns(best, [2] * self._group.size)
        ids = gathered[:, 1::2].contiguous().view(torch.int32)
        rank = gathered[:, 0::2].argmax(1, keepdim=True)
        return Sampled((ids.gather(1, rank) + self._first[rank])[:, 0])

    @staticmethod
    def plan_sampling(sequences: Sequence[WorkerSequence]) -> SamplingPlan:
        """What these sequences ask for in sampling their next token."""
        seq_ids = [sequence.seq_id for sequence in sequences]
        rows = torch.from_numpy(np.array([sequence.row for sequence in sequences], dtype=np.int64))
        if not any(sequence.wants_whole_rows or sequence.ends_are_banned for sequence in sequences):
            count = len(sequences)
            return SamplingPlan(seq_ids, [None] * count, SamplingInput(rows, None, None))
        penalties = penalties_of(sequences) if any(sequence.adjusts_logits for sequence in sequences) else None
        inputs = SamplingInput(rows, _draws(sequences), penalties)
        wanted = [
            None if params.logprobs is None else Wanted(params.logprobs, tuple(params.logprob_token_ids or ()))
            for params in (sequence.sampling for sequence in sequences)
        ]
        return SamplingPlan(seq_ids, wanted, inputs)

    def sample_tokens(
        self,
        local_logits: Tensor,
        plan: SamplingPlan,
        inputs: SamplingInput,
        masks: TokenMasks | None = None,
        readers: Sequence[Callable[[Tensor], None]] = (),
        editors: Sequence[Callable[[Tensor], None]] = (),
    ) -> Sampled:
        """Tokens for rows [R, local vocab] of fp32 logits, which may be overwritten.

        `inputs`: `plan.inputs`, on the device of the logits. `masks`: the tokens that some rows may have. `readers`
        get the whole rows [R, vocab_size] before they are overwritten, unless all rows are greedy. `editors` change
        them in place after penalties and masks.
        """
        if inputs.draws is None and masks is None and not editors:
            return self.choose_best(find_best(self._kernels, local_logits))
        logits = self._group.all_gather_columns(local_logits, self._widths)
        reports = any(wanted is not None for wanted in plan.wanted)
        for read in readers:
            read(logits)
        reported = logits
        if reports and not self._is_processed and (inputs.penalties is not None or masks is not None or editors):
            reported = logits.clone()
        if inputs.penalties is not None:
            penalize_(self._kernels, logits, inputs.penalties)
        if masks is not None:
            mask_tokens_(self._kernels, logits, masks)
        for edit in editors:
            edit(logits)
        if inputs.draws is None:
            return Sampled(greedy_argmax(self._kernels, logits)[0])
        tokens = sample(self._kernels, logits, **inputs.draws._asdict())
        if not reports:
            return Sampled(tokens)
        if self._is_processed:
            assert plan.inputs.draws is not None
            reported = processed_logits(logits, plan.inputs.draws)
        return Sampled(tokens, report(self._kernels, reported, tokens, plan.wanted, as_logits=self._as_logits))

    @staticmethod
    def make_results(plan: SamplingPlan, sampled: Sampled) -> list[SequenceResult]:
        """The results for the engine; `sampled` is in host memory."""
        tokens: list[int] = sampled.tokens.tolist()
        if sampled.reports is None:
            return [SequenceResult(seq_id, [token]) for seq_id, token in zip(plan.seq_ids, tokens, strict=True)]
        reported = read_reports(sampled.reports, plan.wanted, tokens)
        return [
            SequenceResult(seq_id, [token], None if one is None else [one])
            for seq_id, token, one in zip(plan.seq_ids, tokens, reported, strict=True)
        ]


def _draws(sequences: Sequence[WorkerSequence]) -> Draws:
    params = [sequence.sampling for sequence in sequences]
    seeds = np.array([(p.seed or 0) & (2**64 - 1) for p in params], dtype=np.uint64).view(np.int64)
    return Draws(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seeds=torch.from_numpy(seeds),
        choices=torch.tensor([sequence.choice for sequence in sequences], dtype=torch.int64),
        positions=torch.tensor([sequence.num_tokens for sequence in sequences], dtype=torch.int64),
    )
