"""Makes a step's tensors from a plan for kernels of the CPU, which read host memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardline.messages.step import RankStep
from shardline.runtime.machines.base import BlockTables, StepSizes
from shardline.runtime.machines.host.step_layout import StepLayout
from shardline.runtime.sampling.inputs import SamplingInput
from shardline.runtime.sampling.sampler import SamplingPlan
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import StepInput


class InHostMemory:
    """A download that is over before it begins."""

    is_immediate = True
    is_done = True

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return self._tensors


class HostStepInputs:
    """See `base.StepInputs`: a step is over when its last kernel returns, and the host knows every token."""

    def __init__(self, table: BlockTables, sizes: StepSizes) -> None:
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

    def download(self, tensors: list[Tensor]) -> InHostMemory:
        return InHostMemory(tensors)
