"""What a worker remembers about its sequences: tokens, block tables, sampling state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.messages.step import SequenceStart, SequenceStep
from shardline.runtime.step import GivenRows
from shardline.sampling_params import SamplingParams

NO_TOKEN = torch.iinfo(torch.int64).max
"""Stands in place of a token id where there is no token and none will come."""


def stand_in(row: int) -> int:
    """The placeholder for the newest token of the sequence in `row` of a SequenceTable, until the host knows that
    token."""
    return -1 - row


class NextTokens(Protocol):
    """What constrains the next token of a sequence."""

    def append_token(self, token_id: int) -> None:
        """Note a token of the output."""

    def set_allowed(self, allowed: bytes, num_guessed: int = 0) -> None:
        """Note what the grammar allows next and after so many guesses, see `SequenceStep.allowed`."""

    def with_guesses(self, token_ids: Sequence[int]) -> NextTokens:
        """The constraints as if the first guesses were right, which are these."""

    def find_allowed(self) -> npt.NDArray[np.int32]:
        """The tokens that may come next, as bits in words of 32.

        Raises:
            ValueError: there are none.
        """


@dataclass
class WorkerSequence:
    """One sequence: its tokens so far and its own row of the block tables."""

    seq_id: int
    row: int
    tokens: npt.NDArray[np.int64]
    num_tokens: int
    num_prompt_tokens: int
    sampling: SamplingParams
    choice: int
    eos_token_ids: tuple[int, ...]
    output_counts: dict[int, int] = field(default_factory=dict)
    """How often each token was generated; counted only if the sequence has penalties."""
    given: GivenRows | None = None
    """The rows that its prompt has in place of embedded tokens, on the first stage; None: it has none."""
    mask: NextTokens | None = None
    """The constraints on its tokens; None: it has none, or this rank does not sample."""
    num_pending: int = 0
    """How many of its last tokens steps in flight have still to sample; stand-ins hold their places."""
    num_guessed: int = 0
    """How many of its last tokens are guesses."""
    adapter: int = -1
    """The slot of its adapter; negative: it has none."""
    features: frozenset[int] = frozenset()
    """The places of those that it has among the runner's features."""

    @cached_property
    def prompt_ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens of the prompt, ascending."""
        return np.unique(self.tokens[: self.num_prompt_tokens])

    @cached_property
    def has_penalties(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        params = self.sampling
        return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def wants_whole_rows(self) -> bool:
        """Whether every token needs more of its row of logits than the largest."""
        params = self.sampling
        reported = params.logprobs is not None or params.logits_digest
        adjusted = self.has_penalties or bool(params.logit_bias)
        return params.temperature > 0.0 or reported or adjusted

    @property
    def ends_are_banned(self) -> bool:
        """Whether the next token must not end the sequence."""
        return self.num_tokens - self.num_prompt_tokens < self.sampling.min_tokens

    @property
    def adjusts_logits(self) -> bool:
        """Whether the logits of this sequence's next token are adjusted before sampling."""
        return self.has_penalties or bool(self.sampling.logit_bias) or self.ends_are_banned

    def append_token(self, token_id: int) -> None:
        """Append a generated token."""
        self._place(token_id)
        self._count(token_id)

    def append_pending(self) -> None:
        """Append a stand-in for a token that a step in flight will sample, unless guesses hold its place."""
        if self.num_guessed:
            return
        self._place(stand_in(self.row))
        self.num_pending += 1

    def take_tokens(self, token_ids: Sequence[int]) -> None:
        """Replace its draft, or as many of its oldest stand-ins, with tokens that were sampled."""
        if self.num_guessed:
            self.drop_guesses(self.num_tokens - self.num_guessed)
            for token_id in token_ids:
                self.append_token(token_id)
            return
        for token_id in token_ids:
            self.tokens[self.num_tokens - self.num_pending] = token_id
            self.num_pending -= 1
            self._count(token_id)

    def write_tokens(self, first: int, token_ids: Sequence[int]) -> None:
        """Write tokens from position `first` on, which do not count as its own yet."""
        while first + len(token_ids) > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty_like(self.tokens)])
        self.tokens[first : first + len(token_ids)] = token_ids

    def append_guesses(self, token_ids: Sequence[int]) -> None:
        """Append a draft, which `take_tokens` or `drop_guesses` ends."""
        for token_id in token_ids:
            self._place(token_id)
        self.num_guessed = len(token_ids)

    def drop_guesses(self, num_tokens: int) -> None:
        """End a draft of which the guesses among the first `num_tokens` tokens were right."""
        self.num_tokens, self.num_guessed = num_tokens, 0

    def _place(self, token_id: int) -> None:
        if self.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty_like(self.tokens)])
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def _count(self, token_id: int) -> None:
        if self.mask is not None:
            self.mask.append_token(token_id)
        if self.has_penalties:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1


class SequenceTable:
    """All sequences of a worker, with one block table per KV group as rows of a common array."""

    def __init__(self, num_groups: int, max_blocks: int, context: int = 1) -> None:
        """`context`: ranks that share the keys of a request, see `CachePlan`."""
        self._context = context
        self._sequences: dict[int, WorkerSequence] = {}
        self._free_rows: list[int] = []
        self._tables = [np.zeros((0, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._tensors: list[Tensor] = []
        self._num_blocks: npt.NDArray[np.int64] = np.zeros((0, num_groups), dtype=np.int64)

    def __getitem__(self, seq_id: int) -> WorkerSequence:
        return self._sequences[seq_id]

    @property
    def num_rows(self) -> int:
        """The largest row index of any sequence, plus one."""
        return len(self._num_blocks)

    def start_sequence(self, start: SequenceStart) -> WorkerSequence:
        """Add a sequence."""
        num_tokens = len(start.token_ids)
        tokens = np.empty(num_tokens + 256, dtype=np.int64)
        tokens[:num_tokens] = start.token_ids
        sequence = WorkerSequence(
            seq_id=start.seq_id,
            row=self._take_row(),
            tokens=tokens,
            num_tokens=num_tokens,
            num_prompt_tokens=start.num_prompt_tokens,
            sampling=start.sampling,
            choice=start.choice,
            eos_token_ids=tuple(start.eos_token_ids),
            adapter=start.adapter,
        )
        if sequence.has_penalties:
            sequence.output_counts = Counter(start.token_ids[start.num_prompt_tokens :])
        self._sequences[start.seq_id] = sequence
        return sequence

    def end_sequence(self, seq_id: int) -> None:
        """Forget a sequence."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._num_blocks[sequence.row] = 0
            self._free_rows.append(sequence.row)

    def advance_sequence(self, step: SequenceStep) -> WorkerSequence:
        """Apply a plan's entry for one sequence: its new blocks, and the token from which it continues, if the plan
        names that token."""
        sequence = self._sequences[step.seq_id]
        for group, blocks in enumerate(step.new_blocks):
            if blocks:
                first = self._num_blocks[sequence.row, group]
                self._tables[group][sequence.row, first : first + len(blocks)] = blocks
                if self._context > 1:
                    self._tables[group][sequence.row, first : first + len(blocks)] //= self._context
                self._num_blocks[sequence.row, group] = first + len(blocks)
        if sequence.num_guessed:
            # This rank does not sample, so only the plan tells it which guesses were right.
            sequence.drop_guesses(step.start)
        if step.start == sequence.num_tokens and step.token_id >= 0:
            sequence.append_token(step.token_id)
        sequence.append_guesses(step.draft_token_ids)
        if sequence.mask is not None:
            sequence.mask.set_allowed(step.allowed, sequence.num_guessed)
        assert step.start + step.num_tokens <= sequence.num_tokens, "the plan computes unknown tokens"
        return sequence

    def blocks_of(self, row: int, group: int) -> npt.NDArray[np.int32]:
        """The block ids of the sequence in a row."""
        return self._tables[group][row, : self._num_blocks[row, group]]

    @property
    def tensors(self) -> list[Tensor]:
        """The current block ids of each KV group, [num_rows, max_blocks] int32."""
        return self._tensors

    def _take_row(self) -> int:
        if not self._free_rows:
            size = len(self._num_blocks)
            grown = max(16, 2 * size)
            for group, table in enumerate(self._tables):
                self._tables[group] = np.zeros((grown, table.shape[1]), dtype=np.int32)
                self._tables[group][:size] = table
            self._tensors = [torch.from_numpy(table) for table in self._tables]
            counts = np.zeros((grown, self._num_blocks.shape[1]), dtype=np.int64)
            counts[:size] = self._num_blocks
            self._num_blocks = counts
            self._free_rows = list(range(grown - 1, size - 1, -1))
        return self._free_rows.pop()
