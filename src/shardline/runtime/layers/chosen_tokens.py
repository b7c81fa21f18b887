"""Which rows of a step attend to chosen tokens only, and the choice that layers share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardline.runtime.step import Rows


class SplitRows(NamedTuple):
    """The rows of a step by what they attend to."""

    whole: Tensor
    """[W] int64: the rows that see no more tokens than are chosen, and attend to all of them."""
    tables: tuple[Tensor, Tensor, Tensor]
    """The block tables, query_starts and context_lens of these, see `Rows`."""
    chosen: Tensor
    """[C] int64: the others"""
    sequences: Tensor
    """[C] int32: the sequence of each."""
    contexts: Tensor
    """[C] int32: the tokens that each sees."""


class ChosenTokens:
    """What the layers of a stage know of the choices of a step."""

    def __init__(self) -> None:
        self._has_layers = False
        self.are_shared = False
        """Whether a layer attends to the choice of another one."""
        self._split: tuple[Rows, int, int, SplitRows | None] | None = None
        self._slots: tuple[Rows, Tensor] | None = None

    def add_layer(self) -> bool:
        """Whether it is the first one, with which a step begins."""
        is_first, self._has_layers = not self._has_layers, True
        return is_first

    def begin_step(self) -> None:
        """Forget the step before: the next one may have its rows in the same memory."""
        self._split = self._slots = None

    def split(self, rows: Rows, kv_group: int, top_k: int) -> SplitRows | None:
        """None: no row sees more than `top_k` tokens. All layers of a step ask for the same rows."""
        known = self._split
        if known is None or known[0] is not rows or known[1:3] != (kv_group, top_k):
            self._split = known = rows, kv_group, top_k, _split(rows, kv_group, top_k)
        return known[3]

    def keep(self, rows: Rows, slots: Tensor) -> None:
        """Keep the slots [num_rows, top_k] that a layer has chosen, if layers share them."""
        if self.are_shared:
            self._slots = rows, slots

    def forget_choice(self) -> None:
        """The next layer chooses anew. A choice takes much memory."""
        self._slots = None

    def shared(self, rows: Rows) -> Tensor:
        """The slots of the last choice, for rows that may be those that go on of the step's."""
        assert self._slots is not None, "a layer before has chosen"
        chosen_for, slots = self._slots
        return slots if chosen_for is rows else rows.take(slots)


def _split(rows: Rows, kv_group: int, top_k: int) -> SplitRows | None:
    contexts = (rows.positions + 1).to(torch.int32)
    is_chosen = contexts > top_k
    if not bool(is_chosen.any()):
        return None
    lengths = rows.query_starts.diff().long()
    sequences = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    whole, chosen = ((~is_chosen).nonzero()[:, 0], is_chosen.nonzero()[:, 0])
    # The rows of a sequence are in order, so those that see few tokens come first.
    counts = torch.bincount(sequences.index_select(0, whole), minlength=len(lengths))
    some = counts.nonzero()[:, 0]
    counts = counts.index_select(0, some)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    lens = contexts.index_select(0, whole).index_select(0, starts[1:].long() - 1) if len(some) else contexts[:0]
    return SplitRows(
        whole,
        (rows.block_tables[kv_group].index_select(0, some), starts, lens),
        chosen,
        sequences.index_select(0, chosen).to(torch.int32),
        contexts.index_select(0, chosen),
    )
