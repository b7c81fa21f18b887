"""How the rows of a step attend if ranks share the keys of each sequence; a decode step keeps what still holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardline.runtime.key_share import KeyShare, SharedRun, share_rows
from shardline.runtime.step import Rows, StepInput


class StepSharing:
    """Adds `Rows.shared` to the steps of one rank."""

    def __init__(self, share: KeyShare, num_kv_groups: int, max_seqs: int) -> None:
        """`max_seqs`: sequences of the decode steps that use the same memory; 0: none do."""
        self._share = share
        self._num_kv_groups = num_kv_groups
        self._memory = torch.empty(num_kv_groups, 2 * max_seqs, dtype=torch.int32)
        self._last: tuple[StepInput, object, StepInput] | None = None
        """The last decode step, without and with what sharing needs, and of what it depends."""

    def share_step(self, step: StepInput, lengths: Sequence[int]) -> StepInput:
        """The step for ranks that share keys; `lengths`: tokens of each sequence."""
        rows, reuses = step.rows, step.is_replayable
        for slots in rows.slots:
            self._share.mask_slots(slots, rows.positions)
        plan = self._plan(lengths, rows)
        if reuses and self._last is not None:
            before, like, shared_step = self._last
            if before is step and like == (lengths, plan):
                return shared_step
        memory = self._memory if reuses else None
        shared = share_rows(plan, lengths, rows.block_tables, rows.context_lens, memory)
        narrowed = rows.narrowed and replace(rows.narrowed, shared=shared)
        travels = any(run.brings_keys for group in shared for run in group.runs)
        rows = replace(rows, shared=shared, narrowed=narrowed)
        shared_step = replace(step, rows=rows, is_replayable=reuses and not travels)
        if reuses:
            self._last = step, (lengths, plan), shared_step
        return shared_step

    def share_narrowed(self, narrowed: Rows, counts: Sequence[int]) -> Rows:
        """A narrowed table for ranks that share keys; `counts`: rows of each sequence."""
        shared = share_rows(self._plan(counts, narrowed), counts, narrowed.block_tables, narrowed.context_lens)
        return replace(narrowed, shared=shared)

    def _plan(self, lengths: Sequence[int], rows: Rows) -> list[tuple[SharedRun, ...]]:
        context_lens = rows.context_lens.tolist()
        return [self._share.plan_rows(lengths, context_lens, group) for group in range(self._num_kv_groups)]
