"""A second model on the ranks of the last stage, whose greedy continuation of a sequence is its next draft.

It computes a token's keys and values when a plan asks for guesses, and not before: while nothing is drafted, it costs
nothing. They lie in pages of its own, under the block ids that the sequence has in one of the first model's KV groups.
So sequences with a common prefix share them, too. Each block is known by a digest of all tokens up to its end, and what
a sequence finds under another one is computed again.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.deployment.deployment import Deployment
from shardline.messages.step import RankStep, SequenceResult, SequenceStart, SequenceStep, StepPlan
from shardline.models.kv_blocks import SPLIT_TOKENS
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.layers.vocabulary import LMHead
from shardline.runtime.machines.base import Backend, StepSizes
from shardline.runtime.ops.sampling.sample import find_best
from shardline.runtime.sampling.sampler import Sampler
from shardline.runtime.sequences import SequenceTable, WorkerSequence
from shardline.runtime.step import StepInput


def _most_short(deployment: Deployment) -> int:
    """Rows that a sequence has at most in the first pass after a draft: those of its last token, and of the last guess
    if all were right; a head computes all guesses again. Passes of no more than these are replayed."""
    draft = deployment.draft
    assert draft is not None
    return 2 if draft.spec.head_input is None else 1 + deployment.limits.speculation.num_speculative_tokens


def draft_sizes(deployment: Deployment) -> StepSizes:
    """Bounds of the draft model's passes."""
    draft, cache, limits = deployment.draft, deployment.cache, deployment.limits
    assert draft is not None
    return StepSizes(
        max_seqs=max(2 * limits.max_num_seqs, _most_short(deployment)),
        max_blocks=cache.max_blocks + draft.num_spare_blocks // limits.max_num_seqs,
        num_kv_groups=1,
        block_size=cache.block_size,
        hidden_size=draft.spec.hidden_size,
        dtype=getattr(torch, deployment.dtype),
    )


@dataclass
class _Cursor:
    """What is there of one sequence."""

    computed: int = 0
    """Its first tokens whose keys and values are."""
    ahead: list[int] = field(default_factory=list)
    """The guesses behind these whose keys and values are there too."""
    num_hashed: int = 0
    """Full blocks that `digest` covers."""
    digest: int = 0
    is_new: bool = True


@dataclass
class Asked:
    """A sequence whose next tokens are guessed."""

    sequence: WorkerSequence
    num_tokens: int
    """With those that the step has just sampled."""
    num_rows: int
    """Of these tokens, see `DraftModel.next_token`."""
    count: int
    """The most guesses."""
    ends: Container[int]
    """Tokens behind which nothing is guessed."""
    cursor: _Cursor
    guesses: list[int] = field(default_factory=list)


class Part(NamedTuple):
    """The tokens of a sequence that one pass computes."""

    asked: Asked
    first: int
    """The position of its first row."""
    length: int
    place: int | None = None
    """Behind a guess: the place of this sequence in the last pass."""


class _BlockTables:
    """The block table of each row of a `SequenceTable`, see `machines.base.BlockTables`."""

    def __init__(self, max_blocks: int) -> None:
        self._table: npt.NDArray[np.int32] = np.zeros((0, max_blocks), dtype=np.int32)
        self.tensors: list[Tensor] = []

    @property
    def num_rows(self) -> int:
        return len(self._table)

    def write(self, row: int, blocks: npt.NDArray[np.int32], spare: range) -> None:
        """The blocks of a row, and those behind them."""
        if row >= len(self._table):
            grown = np.zeros((max(16, 2 * row), self._table.shape[1]), dtype=np.int32)
            grown[: len(self._table)] = self._table
            self._table, self.tensors = grown, [torch.from_numpy(grown)]
        count = len(blocks)
        self._table[row, :count] = blocks
        self._table[row, count : count + len(spare)] = spare


class DraftModel(Feature):
    """Guesses what follows the tokens that a step has sampled, where its plan asks for it.

    It runs in Python after each step, on all ranks of the last stage alike, since all know the same tokens and blocks,
    or on one of them. The scheduler takes the guesses of the rank that reports tokens, and every rank verifies these.
    """

    next_token = 0
    """How far the token that a row reads lies behind the row's position; the row guesses the one after."""

    def __init__(
        self,
        deployment: Deployment,
        backend: Backend,
        stage: DecoderStage,
        lm_head: LMHead,
        num_blocks: int,
        sequences: SequenceTable,
    ) -> None:
        """`stage`: all layers of the draft model; `num_blocks`: of the pool."""
        draft, sizes = deployment.draft, draft_sizes(deployment)
        assert draft is not None
        self._stage, self._kernels, self._sequences = stage, backend.kernels, sequences
        self._group, self._block_size = draft.group, sizes.block_size
        self._num_blocks = num_blocks
        self._context, self._of_split = deployment.cache.context, SPLIT_TOKENS // sizes.block_size
        self._spare_each = sizes.max_blocks - deployment.cache.max_blocks
        self._max_short, self._most_short = sizes.max_seqs, _most_short(deployment)
        self._max_rows = max(deployment.limits.max_num_batched_tokens, sizes.max_seqs)
        self._max_model_len = deployment.max_model_len
        self._vocab_size, self._own_vocab_size = deployment.spec.vocab_size, draft.spec.vocab_size
        self._tables = _BlockTables(sizes.max_blocks)
        self._inputs = backend.make_step_inputs(self._tables, sizes)
        self._forward = backend.make_replay(stage.forward, sizes, can_capture=False)
        self._sampler = Sampler(backend.kernels, lm_head.spans, lm_head.group, backend.device)
        self._fuses_argmax = lm_head.fuses_argmax
        self._cursors: dict[int, _Cursor] = {}
        """By the rows of sequences."""
        self._content: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        """The digest of each block that is full; 0: it is not, or has been changed."""
        self.num_bytes = self._bind_pages(deployment, backend)

    def _bind_pages(self, deployment: Deployment, backend: Backend) -> int:
        """Give the layers pages for all blocks; returns their bytes."""
        cache, bound, total = deployment.cache, dict[int, tuple[Tensor, ...]](), 0
        assert deployment.draft is not None
        num_blocks = self._num_blocks + deployment.draft.num_spare_blocks
        for index, layer in enumerate(self._stage.layers):
            if layer.storing == index:
                parts = layer.attention.cache_parts(num_blocks, cache.block_size, cache.dtype)
                bound[index] = tuple(backend.pages_empty(part.shape, getattr(torch, part.dtype)) for part in parts)
                total += sum(part.num_bytes for part in parts)
        for layer in self._stage.layers:
            layer.attention.bind_cache(*bound[layer.storing])
        return total

    def start_sequence(self, sequence: WorkerSequence, start: SequenceStart) -> None:
        self._cursors[sequence.row] = _Cursor()

    def begin(self, running: RunningStep) -> DraftModel | None:
        return self if any(step.num_guesses for step in running.plan.steps) else None

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        steps = {step.seq_id: step for step in running.plan.steps if step.num_guesses}
        if not steps:
            return results
        sequences = {sequence.seq_id: sequence for sequence in running.sampled}
        asked: dict[int, Asked] = {}
        for result in results:
            step = steps.get(result.seq_id)
            if step is None or result.error or not result.token_ids:
                continue
            sequence, known = sequences[result.seq_id], step.start + step.num_tokens - len(step.draft_token_ids)
            ends = {
                *sequence.sampling.stop_token_ids,
                *(() if sequence.sampling.ignore_eos else sequence.eos_token_ids),
            }
            if not ends.isdisjoint(result.token_ids):
                continue  # its answer is over
            num_tokens = known + len(result.token_ids)
            count = min(step.num_guesses, self._max_model_len - num_tokens)
            if count > 0:
                # The runner writes the same tokens there later. What is behind a sequence's tokens is free.
                sequence.write_tokens(known, result.token_ids)
                num_rows = num_tokens - self.next_token
                asked[result.seq_id] = Asked(sequence, num_tokens, num_rows, count, ends, self._cursors[sequence.row])
        self._guess(list(asked.values()))
        return [
            msgspec.structs.replace(result, guesses=asked[result.seq_id].guesses) if result.seq_id in asked else result
            for result in results
        ]

    def _guess(self, asked: Sequence[Asked]) -> None:
        """Find the guesses of these sequences; none for those whose tokens are too many for one pass."""
        parts: list[Part] = []
        left = self._max_rows
        for place, one in enumerate(asked):
            self._find_computed(one)
            length = min(one.num_rows - one.cursor.computed, left)
            if length:
                left -= length
                self._prepare_blocks(place, one)
                parts.append(Part(one, one.cursor.computed, length))
        while parts:
            following = []
            for place, (part, token) in enumerate(zip(parts, self._run(parts), strict=True)):
                one, cursor, end = part.asked, part.asked.cursor, part.first + part.length
                if end <= one.num_rows:
                    # Behind the sequence's blocks, the last token's are in a spare one, which is not kept.
                    cursor.computed = min(end, len(self._blocks(one.sequence)) * self._block_size)
                    self._note_content(one)
                if end < one.num_rows or token >= self._vocab_size:  # an id that only pads the draft's vocabulary
                    continue
                one.guesses.append(token)
                if len(one.guesses) < one.count and token not in one.ends:
                    one.sequence.write_tokens(end + self.next_token, [token])
                    following.append(Part(one, end, 1, place))
            parts = following
        for one in asked:
            covered = len(self._blocks(one.sequence)) * self._block_size - one.num_rows
            # A head computes them again, with the model's hidden states.
            kept = 0 if self.next_token else max(0, min(len(one.guesses) - 1, covered))
            one.cursor.ahead = one.guesses[:kept]

    def _run(self, parts: Sequence[Part]) -> list[int]:
        """The best token after each part."""
        lengths = [part.length for part in parts]
        num_rows, is_short = sum(lengths), max(lengths) <= self._most_short
        is_short = is_short and num_rows <= self._max_short
        steps = [
            SequenceStep(one.sequence.seq_id, first, length, [], -1, True, False, [0] * (length - 1) * is_short)
            for one, first, length, _ in parts
        ]
        rank_step = RankStep(StepPlan(0, [], steps, []), (num_rows,), (num_rows if is_short else len(parts),))
        sequences = [part.asked.sequence for part in parts]
        step = self._inputs.make_step(rank_step, sequences, None, self._fuses_argmax)
        tokens: list[int] = self._sampler.choose_best(self._compute(step, parts)).tokens.tolist()
        if len(tokens) == len(parts):
            return tokens
        return [tokens[end - 1] for end in np.cumsum(lengths).tolist()]

    def _compute(self, step: StepInput, parts: Sequence[Part]) -> Tensor:
        """The best of this rank's logits in each row of a step that has these parts, see `LMHead.find_best`."""
        if self._own_vocab_size < self._vocab_size:
            step.token_ids.clamp_(max=self._own_vocab_size - 1)
        hidden = self._stage.embed(step)
        output = self._forward(self._stage.add_inputs(step, hidden), hidden)
        return output if self._fuses_argmax else find_best(self._kernels, output)

    def _blocks(self, sequence: WorkerSequence) -> npt.NDArray[np.int32]:
        """The blocks of a sequence that its plans have named. Ranks that share its keys know each by its number on the
        rank that has it, see `CachePlan`, and all have the draft model's keys of it."""
        blocks = self._sequences.blocks_of(sequence.row, self._group)
        if self._context == 1:
            return blocks
        return blocks * self._context + np.arange(len(blocks), dtype=np.int32) // self._of_split % self._context

    def _find_computed(self, one: Asked) -> None:
        """Find out which keys and values are there; at least those of the last token are computed again."""
        cursor, tokens, last = one.cursor, one.sequence.tokens, one.num_rows - 1
        if cursor.is_new:
            cursor.is_new = False
            blocks = self._blocks(one.sequence)
            while (end := (cursor.num_hashed + 1) * self._block_size) <= last:
                digest = self._digest(one)
                if self._content[blocks[cursor.num_hashed]] != digest:
                    break
                cursor.computed, cursor.num_hashed, cursor.digest = end, cursor.num_hashed + 1, digest
        for guess in cursor.ahead:
            if cursor.computed >= last or tokens[cursor.computed] != guess:
                break
            cursor.computed += 1
        cursor.ahead = []
        self._note_content(one)

    def _prepare_blocks(self, place: int, one: Asked) -> None:
        """Lay out the blocks of a sequence, with spare ones behind them for the guesses."""
        blocks, first = self._blocks(one.sequence), one.cursor.computed // self._block_size
        self._content[blocks[first:]] = 0
        spare = self._num_blocks + place * self._spare_each
        self._tables.write(one.sequence.row, blocks, range(spare, spare + self._spare_each))

    def _note_content(self, one: Asked) -> None:
        """Note which blocks have become full."""
        cursor, blocks = one.cursor, self._blocks(one.sequence)
        while (cursor.num_hashed + 1) * self._block_size <= cursor.computed and cursor.num_hashed < len(blocks):
            cursor.digest = self._digest(one)
            self._content[blocks[cursor.num_hashed]] = cursor.digest
            cursor.num_hashed += 1

    def _digest(self, one: Asked) -> int:
        """The digest of what rows have read up to the end of the first block that its cursor's does not cover."""
        first = one.cursor.num_hashed * self._block_size
        end = first + self._block_size + self.next_token
        return hash((one.cursor.digest, one.sequence.tokens[first:end].tobytes()))
