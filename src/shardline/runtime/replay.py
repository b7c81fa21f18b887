"""Decode steps, recorded once per number of sequences and replayed in one call into C++: the CPU's CUDA graph.

The layers are ordinary Python that calls kernels; which ones, on what memory, follows from the step's shape alone. So
the first decode step of a shape runs as any other while its kernel calls are kept; later ones put their inputs where
the first had its own, and run those calls without Python.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardline import _cpu
from shardline.runtime.step import KVGroupInput, StepInput

_log = logging.getLogger(__name__)

_MAX_PROGRAMS = 1024
"""A program takes some ten kilobytes; replicas in lockstep have many combinations of counts."""

Forward = Callable[[StepInput, Tensor], Tensor]
"""A step and its hidden states [T, H] -> the stage's output."""


class _TorchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations of torch's own, which no program can replay. Views compute nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to be skipped by torch.compile, torch would first import it, for a second and a half."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # `reshape` and `to` may be views, or copies.
        if not func.is_view or _storages(result) - _storages(args):
            self.computed = str(func)
        return result


@functools.cache
def resolve_operators() -> None:
    """Look all of torch's operators up, for a process in which several threads record.

    Under a mode torch finds an operator's Python object at its first use and keeps a pointer that does not own it: of
    two threads that are first at once, one's object takes the other's place, which dies.
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "aten":
            packet, _, overload = operator.partition(".")
            getattr(getattr(torch.ops.aten, packet), overload or "default")


def _storages(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


class _StepBuffers:
    """Inputs of decode steps of up to `max_seqs` sequences, where every program finds them."""

    def __init__(
        self, max_seqs: int, max_blocks: int, num_kv_groups: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self._token_ids = torch.zeros(max_seqs, dtype=torch.int64)
        self._positions = torch.zeros(max_seqs, dtype=torch.int64)
        self._query_starts = torch.arange(max_seqs + 1, dtype=torch.int32)
        self._context_lens = torch.zeros(max_seqs, dtype=torch.int32)
        self._tables = [torch.zeros(max_seqs, max_blocks, dtype=torch.int32) for _ in range(num_kv_groups)]
        self._slots = [torch.zeros(max_seqs, dtype=torch.int64) for _ in range(num_kv_groups)]
        self._hidden = torch.zeros(max_seqs, hidden_size, dtype=dtype)

    def fill(self, step: StepInput, hidden: Tensor) -> tuple[StepInput, Tensor]:
        """Copy a step in; return it as it lies here."""
        count = len(step.positions)
        self._positions[:count] = step.positions
        self._context_lens[:count] = step.context_lens
        for group, table, slots in zip(step.kv_groups, self._tables, self._slots, strict=True):
            table[:count, : group.block_tables.shape[1]] = group.block_tables
            slots[:count] = group.slots
        self._hidden[:count] = hidden
        groups = (
            KVGroupInput(table[:count], slots[:count]) for table, slots in zip(self._tables, self._slots, strict=True)
        )
        placed = StepInput(
            token_ids=self._token_ids[:count],
            positions=self._positions[:count],
            query_starts=self._query_starts[: count + 1],
            context_lens=self._context_lens[:count],
            kv_groups=tuple(groups),
            replica_tokens=step.replica_tokens,
            replica_samples=step.replica_samples,
            sampled=None,
            greedy=step.greedy,
        )
        return placed, self._hidden[:count]


class DecodeReplay:
    """A stage's forward pass, replayed for decode steps of a number of sequences that was there before."""

    def __init__(
        self,
        forward: Forward,
        *,
        max_seqs: int,
        max_blocks: int,
        num_kv_groups: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`max_blocks`: of the longest sequence."""
        self.forward = forward
        self._max_seqs = max_seqs
        self._buffers = _StepBuffers(max_seqs, max_blocks, num_kv_groups, hidden_size, dtype)
        self._programs: dict[object, _cpu.Program] = {}
        """By what the layers' calls follow from, see `_shape`."""
        self._possible = True

    def __call__(self, step: StepInput, hidden: Tensor) -> Tensor:
        count = len(step.positions)
        decodes = step.sampled is None and count == len(step.context_lens) <= self._max_seqs
        if not decodes or not self._possible:
            return self.forward(step, hidden)
        placed, placed_hidden = self._buffers.fill(step, hidden)
        program = self._programs.get(_shape(step))
        if program is None:
            return self._record(placed, placed_hidden)
        output = program.replay()
        return self.forward(placed, placed_hidden) if output is None else output

    def _record(self, step: StepInput, hidden: Tensor) -> Tensor:
        if _cpu.activation_bytes() > 0 or len(self._programs) == _MAX_PROGRAMS:
            return self.forward(step, hidden)
        program = _cpu.Program()
        program.begin()
        try:
            with _TorchWatch() as watch:
                output = self.forward(step, hidden)
        finally:
            program.end()
        if watch.computed is None:
            program.set_output(output)
            self._programs[_shape(step)] = program
        else:
            self._possible = False
            _log.debug("decode steps are not replayed: a layer computes with %s", watch.computed)
        return output


def _shape(step: StepInput) -> object:
    """What the kernel calls of a decode step follow from; replicas in lockstep exchange as much as they compute."""
    return step.replica_tokens, step.replica_samples, step.greedy
