"""Decode steps and short prompts, recorded once per number of sequences and tokens, and replayed in one call into C++:
the CPU's counterpart of a CUDA graph.

The layers are ordinary Python that calls kernels. The step's shape alone determines which kernels they call, and on
which memory. So the first step of a shape runs as usual, and its kernel calls are recorded. Later steps of that
shape have their inputs in the same memory (`step_layout.py`) and repeat these calls without Python.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardline import _cpu
from shardline.runtime.machines.base import Forward, StepSizes
from shardline.runtime.step import StepInput

_log = logging.getLogger(__name__)

_MAX_PROGRAMS = 1024
"""A program takes about ten kilobytes, and replicas in lockstep have many combinations of counts."""


class DecodeReplay:
    """See `base.Replay`: steps are recorded at the first of their shape and replayed from then on."""

    def __init__(self, forward: Forward, sizes: StepSizes) -> None:
        self.forward = forward
        self._hidden = torch.zeros(sizes.max_seqs, sizes.hidden_size, dtype=sizes.dtype)
        self._programs: dict[object, tuple[_cpu.Program, StepInput]] = {}
        """Recorded programs by step shape, see `_shape`, and their steps, whose tensors the kernel calls read."""
        self._unrecorded: set[bool] = set()
        """Whether torch computes in layers of short prompts (true), and of decode steps (false)."""

    def __call__(self, step: StepInput, hidden: Tensor) -> Tensor:
        if not step.is_replayable or step.rows.narrow().are_last in self._unrecorded:
            return self.forward(step, hidden)
        placed = self._hidden[: len(hidden)]
        placed.copy_(hidden)
        recorded = self._programs.get(_shape(step))
        if recorded is None:
            return self._record(step, placed)
        output = recorded[0].replay()
        return self.forward(step, placed) if output is None else output

    def capture_steps(self) -> None:
        """Does nothing: a step is recorded when it first runs."""

    def _record(self, step: StepInput, hidden: Tensor) -> Tensor:
        if _cpu.activation_bytes() > 0 or len(self._programs) == _MAX_PROGRAMS:
            return self.forward(step, hidden)
        program = _cpu.Program()
        program.begin()
        try:
            with TorchDetector() as detector:  # type: ignore[no-untyped-call]
                output = self.forward(step, hidden)
        finally:
            program.end()
        if detector.computed is None:
            program.set_output(output)
            self._programs[_shape(step)] = program, step
        else:
            self._unrecorded.add(step.rows.narrow().are_last)
            _log.debug("these steps are not replayed: a layer computes with %s", detector.computed)
        return output


def _shape(step: StepInput) -> object:
    """Everything that determines the kernel calls of a decode step. The counts of all replicas in lockstep belong to
    it, because they determine the exchanges."""
    rows = step.rows
    adapted = rows.adapters is not None, rows.scaled, rows.adapts_experts
    shared = None if rows.shared is None else tuple(group.runs for group in rows.shared)
    masked = step.allowed is not None
    return len(rows.context_lens), rows.replicas, rows.narrow().replicas, step.greedy, masked, adapted, shared


class TorchDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects torch's own operations, which no program can replay. Views compute nothing, so they are allowed."""

    computed: str | None = None
    """The last of its operations; None: there was none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because True would make torch import torch.compile, which takes one and a half seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # `reshape` and `to` may return views or copies.
        if not func.is_view or _storages(result) - _storages(args):
            self.computed = str(func)
        return result


@functools.cache
def resolve_operators() -> None:
    """Look up all of torch's operators, for a process in which several threads record.

    Under a dispatch mode, torch creates an operator's Python object at its first use and keeps a pointer without owning
    the object. If two threads do this at once, one object replaces the other, which is freed while its thread still
    uses it.
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "aten":
            packet, _, overload = operator.partition(".")
            getattr(getattr(torch.ops.aten, packet), overload or "default")


def _storages(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
