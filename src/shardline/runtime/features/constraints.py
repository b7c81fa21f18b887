"""Which tokens a constrained sequence may continue with. It depends on the request and its output only."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.messages.request import Constraints
from shardline.messages.step import SequenceResult, SequenceStart
from shardline.models.partition import Span
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.ops.sampling.mask import TokenMasks
from shardline.runtime.sequences import NextTokens, WorkerSequence
from shardline.runtime.step import StepInput

Words = npt.NDArray[np.int32]
_PANEL_TOKENS = 64
"""A word of a MaskMemory has the bits of this many tokens."""


class TokenMask:
    """The constraints of one sequence and where its output stands in them. The engine follows its grammar."""

    def __init__(self, start: SequenceStart, constraints: Constraints, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        ends = [token_id for token_id in start.eos_token_ids if token_id < vocab_size]
        self._min_tokens = start.sampling.min_tokens
        self._stop_bits = _bits([*ends, *start.sampling.stop_token_ids], self._num_words)
        self._bad_words = [tuple(word) for word in constraints.bad_words if len(word) > 1]
        self._banned_bits = _bits([word[0] for word in constraints.bad_words if len(word) == 1], self._num_words)
        self._bans_tokens = bool(self._banned_bits.any())
        self._output: list[int] = list(start.token_ids[start.num_prompt_tokens :])
        self._allowed = _bits(constraints.allowed_token_ids, self._num_words) if constraints.allowed_token_ids else None
        self._grammar: list[bytes] = []
        """What the grammar allows next, and after each guess; empty: it has none."""

    def append_token(self, token_id: int) -> None:
        """Note a token of the output."""
        self._output.append(token_id)

    def set_allowed(self, allowed: bytes, num_guessed: int = 0) -> None:
        """Note what the grammar allows next and after so many guesses, see `SequenceStep.allowed`."""
        size = len(allowed) // (1 + num_guessed)
        self._grammar = [allowed[start : start + size] for start in range(0, len(allowed), size or 1)]

    def with_guesses(self, token_ids: Sequence[int]) -> TokenMask:
        """The constraints as if the first guesses were right, which are these."""
        view = copy.copy(self)
        view._output = [*self._output, *token_ids]
        view._grammar = self._grammar[len(token_ids) :]
        return view

    def find_allowed(self) -> Words:
        """The tokens that may come next, as bits [ceil(vocab_size / 32)].

        Raises:
            ValueError: there are none.
        """
        words = self._read_grammar()
        if self._allowed is not None:
            words &= self._allowed
        if self._bans_tokens:
            words &= ~self._banned_bits
        last = [word[-1] for word in self._bad_words if tuple(self._output[1 - len(word) :]) == word[:-1]]
        if last:
            words &= ~_bits(last, self._num_words)
        if len(self._output) < self._min_tokens:
            words &= ~self._stop_bits
        if self._vocab_size % 32:
            words[-1] &= (1 << self._vocab_size % 32) - 1
        if not words.any():
            raise ValueError(
                "no token may follow: the request's grammar, allowed_token_ids, bad_words and min_tokens exclude all"
            )
        return words

    def _read_grammar(self) -> Words:
        """The tokens that the grammar allows; all tokens if there is none."""
        if not self._grammar:
            return np.full(self._num_words, -1, dtype=np.int32)
        words = np.zeros(self._num_words, dtype=np.int32)  # the model's vocabulary may be padded, or the tokenizer's
        given = np.frombuffer(self._grammar[0], dtype=np.int32)[: self._num_words]
        words[: len(given)] = given
        return words


class ConstraintRows(Feature):
    """The constraints of the sequences of the last stage."""

    start_fields = ("constraints",)

    def __init__(self, vocab_size: int, span: Span, max_rows: int) -> None:
        """`span`: this rank's part of the vocabulary."""
        self._vocab_size = vocab_size
        self._memory = MaskMemory(max_rows, span)

    def start_sequence(self, sequence: WorkerSequence, start: SequenceStart) -> None:
        assert start.constraints is not None
        sequence.mask = TokenMask(start, start.constraints, self._vocab_size)

    def begin(self, running: RunningStep) -> StepConstraints | None:
        constrained = any(sequence.mask is not None for sequence in running.rows)
        return StepConstraints(self._memory) if constrained else None


class StepConstraints(Feature):
    """The constraints of one step."""

    def __init__(self, memory: MaskMemory) -> None:
        self._memory = memory
        self._refusals: dict[int, tuple[int, str]] = {}
        """By sequence, after how many guesses no token may follow, and why."""

    def prepare(self, running: RunningStep, step: StepInput) -> StepInput:
        """In a greedy step, the search itself leaves tokens out."""
        if not step.greedy:
            return step
        masks = self._collect(running)
        if masks is None:
            return step
        return dataclasses.replace(step, allowed=self._memory.write(masks, len(running.rows)))

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        if not step.greedy and (masks := self._collect(running)) is not None:
            running.masks = TokenMasks(masks.rows.to(output.device), masks.bits.to(output.device))

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        refusals = self._refusals
        return [
            _refuse(result, *refusals[result.seq_id]) if result.seq_id in refusals else result for result in results
        ]

    def _collect(self, running: RunningStep) -> TokenMasks | None:
        """The masks of the sampled rows. Sequences that cannot go on are refused.

        A mask depends on the sequence's last token, so this waits for steps in flight that sample it.
        """
        running.wait_for_tokens([sequence for sequence in running.rows if sequence.mask is not None])
        masks, errors = collect_masks([sequence.mask for sequence in running.rows])
        for row, error in errors.items():
            seq_id = running.rows[row].seq_id
            first = next(place for place, other in enumerate(running.rows) if other.seq_id == seq_id)
            self._refusals.setdefault(seq_id, (row - first, error))
        return masks


def _refuse(result: SequenceResult, num_right: int, error: str) -> SequenceResult:
    """The result of a sequence that cannot go on if its first `num_right` guesses are right. Then it has these, and the
    next step refuses it."""
    if num_right == 0:
        return msgspec.structs.replace(result, error=error, refused=True)
    return msgspec.structs.replace(
        result,
        token_ids=result.token_ids[:num_right],
        logprobs=result.logprobs and result.logprobs[:num_right],
        digests=result.digests and result.digests[:num_right],
    )


def collect_masks(masks: Sequence[NextTokens | None]) -> tuple[TokenMasks | None, dict[int, str]]:
    """The masks of a batch's rows, in host memory, and for each row that cannot go on the reason.

    A row that cannot go on is not masked, since its token is dropped. None: no row is masked.
    """
    rows: list[int] = []
    words: list[Words] = []
    errors: dict[int, str] = {}
    for row, mask in enumerate(masks):
        if mask is None:
            continue
        try:
            words.append(mask.find_allowed())
            rows.append(row)
        except ValueError as error:
            errors[row] = str(error)
    if not rows:
        return None, errors
    return TokenMasks(torch.tensor(rows, dtype=torch.int64), torch.from_numpy(np.stack(words))), errors


class MaskMemory:
    """The masks of a step's rows, restricted to one rank's part of the vocabulary. They are always written to the same
    memory, where recorded steps find them."""

    def __init__(self, max_rows: int, span: Span) -> None:
        """`span`: the part of the vocabulary."""
        self._span = span
        self._shape = max_rows, -(-span.size // _PANEL_TOKENS)

    @cached_property
    def _bits(self) -> npt.NDArray[np.uint64]:
        """Allocated by the first constrained step."""
        return np.zeros(self._shape, dtype=np.uint64)

    def write(self, masks: TokenMasks, num_rows: int) -> Tensor:
        """The masks of all rows of a step, see `StepInput.allowed`; rows without a mask allow all tokens."""
        rows, own = masks.rows.numpy(), _words_from(masks.bits.numpy(), self._span.start)
        words = self._bits.view(np.uint32)
        if len(rows) < num_rows:
            words[:num_rows] = 0xFFFFFFFF
        count = min(own.shape[1], words.shape[1])
        words[rows, :count] = own[:, :count]
        return torch.from_numpy(self._bits.view(np.int64))[:num_rows]


def _words_from(bits: Words, first: int) -> npt.NDArray[np.uint32]:
    """Rows of bits [N, num_words] from bit `first` on; what follows the last bit is undefined."""
    words, shift = bits.view(np.uint32)[:, first // 32 :], first % 32
    if shift == 0:
        return words
    shifted: npt.NDArray[np.uint32] = words >> np.uint32(shift)
    shifted[:, :-1] |= words[:, 1:] << np.uint32(32 - shift)
    return shifted


def _bits(token_ids: Sequence[int], num_words: int) -> Words:
    """The bits of these tokens."""
    words = np.zeros(num_words, dtype=np.uint32)
    ids = np.asarray(token_ids, dtype=np.int64)
    np.bitwise_or.at(words, ids >> 5, np.left_shift(1, ids & 31).astype(np.uint32))
    return words.view(np.int32)
