"""A step between its plan and its result, and what features of a request may do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from shardline.messages.step import SequenceResult, StepPlan
from shardline.runtime.ops.sampling.mask import TokenMasks
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import StepInput


@dataclass
class Launch:
    """One step, while it is launched and until its result is there."""

    plan: StepPlan
    stepped: list[WorkerSequence]
    """The sequences of the plan's steps."""
    sampled: list[WorkerSequence]
    """Those whose next token is sampled."""
    rows: list[WorkerSequence]
    """For each sampled row, its sequence with the tokens before the sampled one."""
    lost_slots: list[int] | None = None
    """See `StepResult`."""
    features: list[Feature] = field(default_factory=list)
    """Those that have something to do in this step."""
    needs_logits: bool = False
    """Whether all logits of the sampled rows are needed, even if the step is greedy."""
    forward: Callable[[StepInput, Tensor], Tensor] | None = None
    """Runs the layers of this step; None: as usual."""
    masks: TokenMasks | None = None
    """The tokens that the sampled rows may have; None: all."""
    errors: dict[int, str] = field(default_factory=dict)
    """What failed, by sequence."""
    refusals: dict[int, str] = field(default_factory=dict)
    """Why no token may follow, by sequence."""
    tensors: list[Tensor] = field(default_factory=list)
    """To be copied to host memory."""
    copies: list[Tensor] = field(default_factory=list)
    """The copies, once the step is over."""

    def download(self, *tensors: Tensor) -> slice:
        """Have tensors copied; returns their places in `copies`."""
        first = len(self.tensors)
        self.tensors += tensors
        return slice(first, len(self.tensors))


class Feature:
    """What a feature does in a step, in this order. All methods but `begin` are called only if that returned a feature:
    itself, or an object for this step."""

    def begin(self, launch: Launch) -> Feature | None:
        """Before the step's tensors are made. None: the step has nothing for it."""
        raise NotImplementedError

    def prepare(self, launch: Launch, step: StepInput) -> StepInput:
        """The step's tensors, before the forward pass."""
        return step

    def after_forward(self, launch: Launch, step: StepInput, output: Tensor) -> None:
        """`output` is that of the stage; nothing is sampled yet."""

    def result(self, launch: Launch, results: list[SequenceResult]) -> list[SequenceResult]:
        """The results of the step so far, one of each sampled row or sequence -> the same with this feature's part."""
        return results
