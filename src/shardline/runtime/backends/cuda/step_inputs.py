"""Steps on a GPU: laid out in host memory, sent to the GPU in one copy, and launched while the previous step still
runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.messages.step import RankStep
from shardline.runtime.backends.base import StepSizes
from shardline.runtime.backends.cuda.download import Download
from shardline.runtime.backends.cuda.last_tokens import LastTokens
from shardline.runtime.backends.cuda.transfers import Uploader
from shardline.runtime.backends.host.step_inputs import StepLayout
from shardline.runtime.sampling.inputs import SamplingInput
from shardline.runtime.sampling.sampler import SamplingPlan
from shardline.runtime.sequences import SequenceTable, WorkerSequence
from shardline.runtime.step import StepInput


class CudaStepInputs:
    """See `base.StepInputs`."""

    def __init__(self, device: torch.device, table: SequenceTable, sizes: StepSizes) -> None:
        self._device = device
        self._table = table
        self._layout = StepLayout(table, sizes, reuses_memory=False)
        self._uploader = Uploader(device)
        self._last_tokens = LastTokens(device, sizes.max_seqs)

    def make_step(
        self,
        rank_step: RankStep,
        sequences: Sequence[WorkerSequence],
        sampling: SamplingPlan | None,
        greedy: bool,
    ) -> StepInput:
        """The step on the GPU. Tokens that the host does not know yet are filled in there."""
        step, tokens = self._layout.make_step(rank_step, sequences, greedy), self._last_tokens
        tokens.reserve_rows(self._table.num_rows)
        has_unknown = bool((step.token_ids < 0).any())
        step = self._uploader.upload(step if sampling is None else dataclasses.replace(step, sampling=sampling.inputs))
        return dataclasses.replace(
            step,
            token_ids=tokens.replace_stand_ins(step.token_ids) if has_unknown else step.token_ids,
            sampling=None if step.sampling is None else step.sampling.replace_stand_ins(tokens.replace_stand_ins),
        )

    def keep_tokens(self, sampling: SamplingInput, tokens: Tensor) -> None:
        self._last_tokens.put_tokens(sampling.rows, tokens)

    def download(self, tensors: list[Tensor]) -> Download:
        return Download(tensors, self._device)
