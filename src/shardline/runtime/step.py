"""A step as tensors, the input of a stage's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.runtime.key_share import SharedRows
from shardline.runtime.sampling.inputs import SamplingInput


class GivenRows(NamedTuple):
    """Rows of hidden states that stand in place of those of the embedding."""

    places: Tensor
    """[num_given] int64: which rows of a step, or positions of a sequence, in ascending order."""
    rows: Tensor
    """[num_given, hidden_size]"""


class ScoredRows(NamedTuple):
    """Which rows tell how likely the prompt's next token was, and which are really sampled; indices are those of
    the narrowed table."""

    rows: Tensor
    """[num_scored] int64"""
    targets: Tensor
    """[num_scored] int64: the id of the prompt's next token after each of these."""
    sampled: Tensor
    """[num_sampled] int64: the rows whose logits are sampled."""


@dataclass(frozen=True)
class Rows:
    """A table of tokens, one a row, those of a sequence one after another. Each layer computes the rows of one table.

    A step begins with all of its tokens. Once the last keys and values are stored, nothing reads the other tokens'
    outputs, so only rows go on whose logits are sampled or scored: `narrow` is called by the layer that stores them.
    """

    positions: Tensor
    """[num_rows] int64"""
    query_starts: Tensor
    """[num_seqs + 1] int32: the first row of each sequence. One with drafts has a sampled row for each guess, too."""
    context_lens: Tensor
    """[num_seqs] int32: the KV length of each sequence at its last row."""
    block_tables: tuple[Tensor, ...]
    """One for each KV group, [num_seqs, max_blocks] int32."""
    slots: tuple[Tensor, ...]
    """One for each KV group, [num_rows] int64: block id * block_size + offset, where a row's keys and values are
    stored; negative: nowhere. Empty in a narrowed table."""
    replicas: tuple[int, ...]
    """The number of rows of each replica in lockstep, this one included."""
    narrowed: Rows | None = None
    """The table of the rows that go on. None: this one."""
    places: Tensor | None = None
    """[num_rows] int64: in a narrowed table, which rows of the step these are. None: all, in order."""
    are_last: bool = False
    """Whether `places` are the last rows of the step."""
    scored: ScoredRows | None = None
    """In a narrowed table. None: all rows are sampled, and none is scored."""
    token_inputs: Tensor | None = None
    """[num_rows, layers of the stage, 2, local size]: see `layers.token_input`; of a head, [num_rows, 2 * hidden_size]:
    what its attention reads. None: the model has none."""
    adapters: Tensor | None = None
    """[num_rows] int32: the slot of each row's adapter; negative: it has none. None: no row has any."""
    scaled: bool = False
    """Whether an adapter of a row has factors of outputs (DoRA)."""
    adapts_experts: bool = False
    """Whether an adapter of a row changes experts."""
    states: Tensor | None = None
    """[num_seqs] int32: the row of each sequence's state. None: the model keeps no states, or the table is narrowed."""
    shared: tuple[SharedRows, ...] | None = None
    """One for each KV group, if ranks share the keys of a request; else None."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def padding(self) -> Tensor | None:
        """[num_rows] int64: negative for rows that only pad a recorded step. None: there are none."""
        return self.slots[0] if self.slots and self.shared is None else None

    def narrow(self) -> Rows:
        """The rows that go on; the same table if it has no others."""
        return self if self.narrowed is None else self.narrowed

    def take(self, x: Tensor) -> Tensor:
        """These rows of x, which has a row for each token of the step."""
        if self.are_last:
            return x[len(x) - len(self) :]
        return x if self.places is None else torch.index_select(x, 0, self.places)


@dataclass(frozen=True)
class StepInput:
    """All sequences of a step, their new tokens one after another."""

    token_ids: Tensor
    """[num_tokens] int64"""
    rows: Rows
    """The table of all tokens."""
    greedy: bool = False
    """Whether only the largest logit of each row is needed."""
    allowed: Tensor | None = None
    """[num_samples, ceil(local vocab / 64)] int64: in a greedy step, the bits of the tokens of this rank's part of the
    vocabulary that each row may have. None: all."""
    sampling: SamplingInput | None = None
    """The sampler's input on a device. None if nothing is sampled, and on the host, where the sampler reads its
    plan."""
    given: GivenRows | None = None
    """What the first stage puts in place of embedded tokens. None: nothing."""
    is_replayable: bool = False
    """Whether this step can be replayed: all decode steps of as many sequences use the same memory, and so do short
    prompts of one sequence."""
