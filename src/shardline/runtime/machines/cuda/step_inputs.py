"""Steps on a GPU: laid out in host memory, sent to the GPU in one copy, and launched while the previous step still
runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardline.messages.step import RankStep
from shardline.runtime.machines.base import BlockTables, StepSizes
from shardline.runtime.machines.host.step_layout import StepLayout
from shardline.runtime.sampling.inputs import SamplingInput
from shardline.runtime.sampling.sampler import SamplingPlan
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import Rows, ScoredRows, StepInput


class LastTokens:
    """One token per row of a SequenceTable; nothing here waits for the device."""

    def __init__(self, device: torch.device, num_rows: int) -> None:
        """`num_rows`: expected number of rows."""
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def reserve_rows(self, num_rows: int) -> None:
        """Make room for rows below `num_rows`."""
        have = len(self._tokens)
        if num_rows > have:
            self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(num_rows)])

    def replace_stand_ins(self, ids: Tensor) -> Tensor:
        """`ids` [N] int64 with tokens in place of their stand-ins."""
        rows = (-1 - ids).clamp_(min=0, max=len(self._tokens) - 1)
        return torch.where(ids < 0, self._tokens[rows], ids)

    def put_tokens(self, rows: Tensor, tokens: Tensor) -> None:
        """Store `tokens` [N] as the newest tokens of the sequences in `rows` [N]."""
        self._tokens.index_copy_(0, rows, tokens.long())


class Download:
    """Tensors on their way to host memory. Their arrival also shows that all earlier launches are done."""

    is_immediate = False

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        # torch uses pinned memory for a non-blocking copy, and keeps it until the copy is done.
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._copied is None or self._copied.query()  # type: ignore[no-untyped-call]

    def wait(self) -> list[Tensor]:
        """Wait for the tensors and return them, in host memory; may be called from any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


class DeviceCounters:
    """See `base.Counters`.

    `publish_counts` starts a copy after a step, at most once per interval, and a later call finds the copy done. So the
    host's values may lag by one interval and one step.
    """

    _INTERVAL = 0.5  # seconds

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host = host
        self.counts = host.to(device)
        self._due = 0.0
        self._download: Download | None = None

    def publish_counts(self) -> None:
        if (now := time.monotonic()) >= self._due:
            self._download = Download([self.counts], self.counts.device)
            self._due = now + self._INTERVAL
        if self._download is not None and self._download.is_done:
            (counters,) = self._download.wait()
            self._host.copy_(counters)
            self._download = None


class Uploader:
    """Steps from host memory to a device, in one copy for which the host does not wait."""

    _ALIGNMENT = 16  # bytes; this also lets kernels load whole vectors

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def upload(self, step: StepInput) -> StepInput:
        """The step with all its tensors on the device, parts of one buffer."""
        tensors = [step.token_ids, *_tensors(step.rows)]
        if step.sampling is not None:
            tensors += step.sampling.list_tensors()
        on_device = iter(self._copy(tensors))
        return StepInput(
            token_ids=next(on_device),
            rows=_from_copies(step.rows, on_device),
            greedy=step.greedy,
            sampling=None if step.sampling is None else step.sampling.from_copies(on_device),
        )

    def _copy(self, tensors: list[Tensor]) -> list[Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        if self._copied is not None:
            self._copied.synchronize()  # the previous step's copy, which is long done
        if end > len(self._staging):
            self._staging = torch.empty(2 * end, dtype=torch.uint8, pin_memory=self._pinned)
        for start, tensor in zip(starts, tensors, strict=True):
            self._staging[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        uploaded = self._staging[:end].to(self._device, non_blocking=True, copy=True)
        if self._pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return [
            uploaded[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]


def _tensors(rows: Rows) -> list[Tensor]:
    """All tensors of a table without `token_inputs`."""
    tables = [tables.contiguous() for tables in rows.block_tables]
    own = [rows.positions, rows.query_starts, rows.context_lens, *tables, *rows.slots]
    optional = [part for part in (rows.places, rows.states) if part is not None]
    return [*own, *optional, *(rows.scored or ()), *([] if rows.narrowed is None else _tensors(rows.narrowed))]


def _from_copies(rows: Rows, copies: Iterator[Tensor]) -> Rows:
    """The same table with copies of its tensors, in the order of `_tensors`."""
    return Rows(
        positions=next(copies),
        query_starts=next(copies),
        context_lens=next(copies),
        block_tables=tuple(next(copies) for _ in rows.block_tables),
        slots=tuple(next(copies) for _ in rows.slots),
        replicas=rows.replicas,
        places=None if rows.places is None else next(copies),
        states=None if rows.states is None else next(copies),
        scored=None if rows.scored is None else ScoredRows(*(next(copies) for _ in rows.scored)),
        narrowed=None if rows.narrowed is None else _from_copies(rows.narrowed, copies),
    )


class CudaStepInputs:
    """See `base.StepInputs`."""

    def __init__(self, device: torch.device, table: BlockTables, sizes: StepSizes) -> None:
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
