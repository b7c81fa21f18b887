"""What a feature of requests may do in a step, between its plan and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from shardline.messages.copies import CopyResult
from shardline.messages.step import SequenceResult, SequenceStart, StepPlan
from shardline.runtime.ops.sampling.mask import TokenMasks
from shardline.runtime.sampling.sampler import SamplingPlan
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import StepInput


class InFlight(Protocol):
    """A step that was launched and may still run on a device."""

    def result(self) -> object:
        """Wait for the step, and take its tokens."""


@dataclass
class RunningStep:
    """A step from its launch until its result is there; features and the runner share it."""

    plan: StepPlan
    stepped: list[WorkerSequence]
    """The sequences of the plan's steps."""
    sampled: list[WorkerSequence]
    """Those whose next token is sampled."""
    rows: list[WorkerSequence]
    """For each sampled row, its sequence with the tokens before the sampled one."""
    sampling: SamplingPlan | None
    """What the rows ask for; None: this rank samples nothing in this step."""
    greedy: bool
    """Whether the lm_head finds only the best token of each row. A feature may need logits and unset it."""
    forward: Callable[[StepInput, Tensor], Tensor]
    """Runs the layers of this step."""
    in_flight: Sequence[InFlight]
    """The steps that were launched before, oldest first."""
    copied: CopyResult | None = None
    """See `StepResult`."""
    features: list[Feature] = field(default_factory=list)
    """Those that have something to do in this step."""
    readers: list[Callable[[RunningStep, Tensor], None]] = field(default_factory=list)
    """Called with this step and its logits [R, vocab_size], which change afterwards; not in a greedy step."""
    editors: list[Callable[[RunningStep, Tensor], None]] = field(default_factory=list)
    """Called with the same after penalties and masks, and change the logits in place; not in a greedy step."""
    masks: TokenMasks | None = None
    """The tokens that the sampled rows may have; None: all."""
    tensors: list[Tensor] = field(default_factory=list)
    """To be copied to host memory."""
    copies: list[Tensor] = field(default_factory=list)
    """The copies, once the step is over."""

    def wait_for_tokens(self, sequences: Iterable[WorkerSequence]) -> None:
        """Wait for the steps in flight that sample the last tokens of `sequences`."""
        while any(sequence.num_pending for sequence in sequences):
            self.in_flight[0].result()

    def download(self, *tensors: Tensor) -> slice:
        """Have tensors copied; returns their places in `copies`."""
        first = len(self.tensors)
        self.tensors += tensors
        return slice(first, len(self.tensors))


class Feature:
    """What a feature does, in this order. The methods after `begin` are called only if that returned a feature: itself,
    or an object for this step.

    A feature names the fields that ask for it. The others of a batch, and their steps, never meet it. One that names
    none meets all sequences.
    """

    start_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of a SequenceStart, or paths of them: where one of them is set, the sequence has the feature."""
    step_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of a SequenceStep: where one of them is set, the step has the feature."""

    def start_sequence(self, sequence: WorkerSequence, start: SequenceStart) -> None:
        """A sequence starts that has the feature."""

    def begin(self, running: RunningStep) -> Feature | None:
        """Before the tensors are made of a step that has the feature. None: there is nothing for it to do."""
        raise NotImplementedError

    def prepare(self, running: RunningStep, step: StepInput) -> StepInput:
        """The step's tensors, before the forward pass."""
        return step

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        """`output` is that of the stage; nothing is sampled yet."""

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        """The results of the step so far, one of each sampled row or sequence -> the same with this feature's part."""
        return results
