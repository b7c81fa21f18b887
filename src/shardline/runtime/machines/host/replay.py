"""Decode steps and short prompts, recorded once per number of sequences and tokens, and replayed in one call into C++:
the CPU's counterpart of a CUDA graph.

The layers are ordinary Python that calls kernels. The step's shape alone determines which kernels they call, and on
which memory. So the first step of a shape runs as usual, and its kernel calls are recorded. Later steps of that
shape have their inputs in the same memory (`step_layout.py`) and repeat these calls without Python.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.machines.base import Forward, StepSizes
from shardline.runtime.machines.host.torch_detector import TorchDetector
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
