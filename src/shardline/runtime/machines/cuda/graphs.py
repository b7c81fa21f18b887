"""Decode steps captured in CUDA graphs, one per batch size; a step is padded to the next size."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardline.runtime.machines.base import Forward, StepSizes
from shardline.runtime.step import Rows, StepInput


def batch_sizes(max_seqs: int) -> list[int]:
    """The captured batch sizes: 1, 2, 4, then every 8 up to 64, every 32 up to 256, then every 128, and `max_seqs`."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, 257, 32), *range(384, max_seqs + 1, 128)]
    return [size for size in sizes if size < max_seqs] + [max_seqs]


class Recording(NamedTuple):
    """A captured call."""

    replay: Callable[[], None]
    output: Tensor
    """The tensor that every replay writes."""


class GraphRecorder(Protocol):
    """Captures calls. Only one runs at a time, so all may use the same memory."""

    def record_call(self, call: Callable[[], Tensor]) -> Recording:
        """Capture a call that has run before, on tensors that do not move."""

    def discard_recordings(self) -> None:
        """Free the memory of all recordings, which must not be replayed any more."""


class CudaRecorder:
    """CUDA graphs with one private pool of memory.

    Exchanges are captured like any kernel; over NCCL, the communicator must have been used before. NCCL's watchdog
    queries events from another thread, so the capture must be limited to the calls of its own thread.
    """

    def __init__(self) -> None:
        self._pool: object | None = None

    def record_call(self, call: Callable[[], Tensor]) -> Recording:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            output = call()
        self._pool = graph.pool()
        return Recording(graph.replay, output)

    def discard_recordings(self) -> None:
        self._pool = None


class PaddedStep:
    """A decode step of `max_seqs` sequences in fixed memory; its first sequences form a smaller step.

    Padding has no keys and no slot, so it writes no cache, and its outputs are not read.
    """

    def __init__(self, device: torch.device, sizes: StepSizes) -> None:
        max_seqs = sizes.max_seqs

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        groups = range(sizes.num_kv_groups)
        self._token_ids = zeros(max_seqs, dtype=torch.int64)
        self._rows = Rows(
            positions=zeros(max_seqs, dtype=torch.int64),
            query_starts=torch.arange(max_seqs + 1, dtype=torch.int32, device=device),
            context_lens=zeros(max_seqs, dtype=torch.int32),
            block_tables=tuple(zeros(max_seqs, sizes.max_blocks, dtype=torch.int32) for _ in groups),
            slots=tuple(zeros(max_seqs, dtype=torch.int64) for _ in groups),
            replicas=(max_seqs,),
        )
        self._hidden = zeros(max_seqs, sizes.hidden_size, dtype=sizes.dtype)

    def fill_step(self, step: StepInput, hidden: Tensor, size: int) -> None:
        """Copy a step into the first sequences of a step of `size` sequences."""
        whole, rows = self._rows, step.rows
        count = len(rows)
        whole.positions[:count].copy_(rows.positions)
        whole.context_lens[:count].copy_(rows.context_lens)
        whole.context_lens[count:size].zero_()
        for padded_tables, tables in zip(whole.block_tables, rows.block_tables, strict=True):
            padded_tables[:count, : tables.shape[1]].copy_(tables)
        for padded_slots, slots in zip(whole.slots, rows.slots, strict=True):
            padded_slots[:count].copy_(slots)
            padded_slots[count:size].fill_(-1)
        self._hidden[:count].copy_(hidden)

    def first_sequences(self, size: int) -> tuple[StepInput, Tensor]:
        """The step of the first `size` sequences, and its hidden states."""
        whole = self._rows
        rows = Rows(
            positions=whole.positions[:size],
            query_starts=whole.query_starts[: size + 1],
            context_lens=whole.context_lens[:size],
            block_tables=tuple(tables[:size] for tables in whole.block_tables),
            slots=tuple(slots[:size] for slots in whole.slots),
            replicas=(size,),
        )
        return StepInput(self._token_ids[:size], rows), self._hidden[:size]

    def empty_step(self, size: int) -> tuple[StepInput, Tensor]:
        """A step of `size` padding sequences, and its hidden states."""
        step, hidden = self.first_sequences(size)
        step.rows.context_lens.zero_()
        for slots in step.rows.slots:
            slots.fill_(-1)
        return step, hidden


class GraphReplay:
    """A stage's forward pass that replays a graph for decode steps.

    All ranks of a group receive the same steps, so they replay and exchange in the same order.
    """

    def __init__(self, forward: Forward, padded: PaddedStep, max_seqs: int, recorder: GraphRecorder) -> None:
        self.forward = forward
        self.sizes = batch_sizes(max_seqs)
        self._padded = padded
        self._recorder = recorder
        self._recordings: dict[int, Recording] = {}

    def run_padded(self, size: int) -> Tensor:
        """Run a step of padding without capture. This compiles the kernels and joins the groups, which a capture must
        not do."""
        return self.forward(*self._padded.empty_step(size))

    def record_size(self, size: int) -> Recording:
        """Capture a step of a size that has run before."""
        step, hidden = self._padded.empty_step(size)
        return self._recorder.record_call(lambda: self.forward(step, hidden))

    def discard_recordings(self) -> None:
        """Discard all captured graphs."""
        self._recordings.clear()
        self._recorder.discard_recordings()

    def capture_steps(self) -> None:
        """Capture all sizes, the largest first, so that the smaller ones reuse its memory pool."""
        for size in reversed(self.sizes):
            self.run_padded(size)
            self._recordings[size] = self.record_size(size)

    def __call__(self, step: StepInput, hidden: Tensor) -> Tensor:
        rows = step.rows
        count = len(rows)
        decodes = rows.narrowed is None and count == len(rows.context_lens) <= self.sizes[-1]
        if not decodes or not self._recordings:
            return self.forward(step, hidden)
        size = next(size for size in self.sizes if size >= count)
        recording = self._recordings[size]
        self._padded.fill_step(step, hidden, size)
        recording.replay()
        return recording.output[:count]
