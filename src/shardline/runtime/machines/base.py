"""What a back end offers beside its kernels: step inputs, replay, measuring and fusing. A back end is one folder beside
this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardline.deployment.deployment import Deployment, KernelFallback, OffloadPlan, RankPlacement, RankWeights
from shardline.deployment.kv_budget import MemoryUse
from shardline.kernels.contract import ComputeDevice, LoadedProducts
from shardline.messages.step import RankStep
from shardline.models.partition import Span
from shardline.runtime.key_share import KeyShare
from shardline.runtime.layers.context import Streams
from shardline.runtime.parallel.collectives import SmallGather
from shardline.runtime.sampling.inputs import SamplingInput
from shardline.runtime.sampling.sampler import SamplingPlan
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import StepInput


class Counters(Protocol):
    """Counters that kernels increase, and that a reader polls in host memory."""

    counts: Tensor
    """The counters that the kernels increase."""

    def publish_counts(self) -> None:
        """Begin to copy the counters to host memory, without waiting for a device."""


class Download(Protocol):
    """Tensors of a step on their way to host memory."""

    is_immediate: bool
    """Whether the step was over when the download began."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> list[Tensor]:
        """Wait for the tensors and return them, in host memory; may be called from any thread."""


@dataclass(frozen=True)
class StepSizes:
    """Bounds of the steps of a rank."""

    max_seqs: int
    max_blocks: int
    """Largest number of blocks in a sequence's block table."""
    num_kv_groups: int
    block_size: int
    hidden_size: int
    dtype: torch.dtype
    keeps_states: bool = False
    """Whether layers keep a state for each sequence, in its row of the SequenceTable."""
    share: KeyShare | None = None
    """Which keys this rank has; None: all of them."""


class BlockTables(Protocol):
    """The block tables of sequences."""

    @property
    def tensors(self) -> list[Tensor]:
        """The current block ids of each KV group, [num_rows, max_blocks] int32."""

    @property
    def num_rows(self) -> int:
        """The largest row index of any sequence, plus one."""


class StepInputs(Protocol):
    """Makes step tensors on the device of the layers, and downloads what the steps sample."""

    def make_step(
        self,
        rank_step: RankStep,
        sequences: Sequence[WorkerSequence],
        sampling: SamplingPlan | None,
        greedy: bool,
    ) -> StepInput:
        """The step of a plan; `sequences` has one sequence for each of the plan's entries."""

    def keep_tokens(self, sampling: SamplingInput, tokens: Tensor) -> None:
        """Keep sampled tokens for later steps, which may be planned before the host knows the tokens."""

    def download(self, tensors: list[Tensor]) -> Download:
        """Begin to copy tensors to host memory."""


Share = Callable[[bytes], Sequence[bytes]]
"""Hands out what this rank has, and returns what each rank has, in their order."""
Forward = Callable[[StepInput, Tensor], Tensor]
"""A step and its hidden states [T, H] -> the stage's output."""


class Replay(Protocol):
    """A stage's forward pass that replays recorded decode steps."""

    forward: Forward
    """The forward pass itself, without replay."""

    def __call__(self, step: StepInput, hidden: Tensor) -> Tensor: ...
    def capture_steps(self) -> None:
        """Record the steps that this back end records in advance; the KV cache is already allocated."""


class NoReplay:
    """See `Replay`: every step runs the layers in Python."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __call__(self, step: StepInput, hidden: Tensor) -> Tensor:
        return self.forward(step, hidden)

    def capture_steps(self) -> None: ...


class Backend(ComputeDevice, Protocol):
    """The machine of one rank."""

    name: str
    """The device's name, for people."""
    kernel_path: str
    """What a request's bits depend on: the instruction set, or the GPU's generation and the compiler's version."""
    num_threads: int
    """Number of host threads."""
    overlaps_steps: bool
    """Whether a step can be launched while the previous one still runs."""
    draws_dummy_weights: bool
    """Whether random weights are drawn on the device; else on the host."""

    def known_answer(self) -> str:
        """A digest of what the kernels give for fixed numbers; empty: it would take too long.

        Raises:
            RuntimeError: they give other bits each time.
        """

    def choose_kernels(self, deployment: Deployment, here: RankPlacement, share: Share) -> tuple[KernelFallback, ...]:
        """Called before weights are packed: choose the kernels for a model on the device at `here`. Returns those of
        its own that it does without, the same ones on all ranks.

        Raises:
            ValueError: the configuration forbids such a choice.
        """

    def finish_loading(self, products: LoadedProducts) -> None:
        """Called when all weights are packed: free the memory that only loading needed, and choose among kernels."""

    def stream_weights(self, plan: OffloadPlan, stage: Span, weights: RankWeights) -> Streams:
        """What reads the weights of a stage that do not stay in memory.

        Raises:
            ValueError: no file can be made in the folder.
        """

    def share_counters(self, host: Tensor) -> Counters:
        """Counters whose values are published in `host`."""

    def make_step_inputs(self, table: BlockTables, sizes: StepSizes) -> StepInputs: ...
    def make_replay(self, forward: Forward, sizes: StepSizes, *, can_capture: bool) -> Replay:
        """`can_capture`: whether a recording, which runs no Python, can include the stage's exchanges."""

    def measure_step(self, run_step: Callable[[], object], replay: Replay) -> MemoryUse:
        """The memory that a rank needs beside its weights for its largest step and for the recordings of `replay`."""

    def make_small_gather(self, group: object, timeout: float) -> SmallGather | None:
        """A gather of few bytes within a torch.distributed group that is faster than torch.distributed's; None: there
        is none."""
