"""Which tokens a constrained sequence may continue with. It depends on the request and its output only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.models.gguf.header import read_header
from shardline.models.gguf.names import is_gguf
from shardline.models.gguf.tokenizer import read_tokenizer_json
from shardline.models.partition import Span
from shardline.runtime.ops.sampling.mask import TokenMasks
from shardline.structured.compiler import GrammarCompiler, Matcher
from shardline.types import Constraints, SequenceStart

Words = npt.NDArray[np.int32]
_PANEL_TOKENS = 64
"""A word of a MaskMemory has the bits of this many tokens."""


class TokenMask:
    """The constraints of one sequence and where its output stands in them."""

    def __init__(
        self, start: SequenceStart, constraints: Constraints, vocab_size: int, matcher: Matcher | None
    ) -> None:
        """`matcher`: at the beginning of the grammar; None: there is no grammar."""
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._matcher = matcher
        self._ends = [token_id for token_id in start.eos_token_ids if token_id < vocab_size]
        self._min_tokens = start.sampling.min_tokens
        self._end_bits = _bits(self._ends, self._num_words)
        self._stop_bits = _bits([*self._ends, *start.sampling.stop_token_ids], self._num_words)
        self._bad_words = [tuple(word) for word in constraints.bad_words if len(word) > 1]
        self._banned_bits = _bits([word[0] for word in constraints.bad_words if len(word) == 1], self._num_words)
        self._bans_tokens = bool(self._banned_bits.any())
        self._output: list[int] = []
        self._allowed = _bits(constraints.allowed_token_ids, self._num_words) if constraints.allowed_token_ids else None
        for token_id in start.token_ids[start.num_prompt_tokens :]:
            self.append_token(token_id)

    @property
    def matcher(self) -> Matcher | None:
        """Where the output stands in its grammar; None: there is no grammar."""
        return self._matcher

    def append_token(self, token_id: int) -> None:
        """Note a token of the output."""
        self._output.append(token_id)
        if self._matcher is not None:
            self._matcher.append_token(token_id, is_end=token_id in self._ends)

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is at its end, so that the sequence ends with its last token."""
        return self._matcher is not None and self._matcher.is_finished

    def find_allowed(self) -> Words:
        """The tokens that may come next, as bits [ceil(vocab_size / 32)].

        Raises:
            ValueError: there are none, or the grammar cannot be followed.
        """
        words = self._follow_grammar()
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

    def _follow_grammar(self) -> Words:
        """The tokens that the grammar allows; all tokens if there is none or it is at its end."""
        if self._matcher is None or self._matcher.is_finished:
            return np.full(self._num_words, -1, dtype=np.int32)
        words, may_end = self._matcher.find_allowed()
        if len(words) < self._num_words:  # the model's vocabulary is padded
            words = np.concatenate([words, np.zeros(self._num_words - len(words), dtype=np.int32)])
        words = words[: self._num_words]
        if may_end:
            words |= self._end_bits
        return words


def _read_tokenizer(file: Path) -> bytes:
    """The tokenizer.json that a file is, or that a GGUF file contains."""
    return read_tokenizer_json(read_header(file)) if is_gguf(file) else file.read_bytes()


class ConstraintMaker:
    """Makes the masks of the sequences of one rank."""

    def __init__(self, vocab_size: int, tokenizer_file: str, num_threads: int = 1) -> None:
        """`tokenizer_file`: empty if the model has no tokenizer, so that no request has a grammar."""
        self._vocab_size = vocab_size
        self._compiler = GrammarCompiler(tokenizer_file, _read_tokenizer, num_threads) if tokenizer_file else None

    def prepare_grammar(self, grammar: str) -> None:
        """Begin to compile a grammar in another thread."""
        if self._compiler is not None:
            self._compiler.start_grammar(grammar)

    def make_mask(self, start: SequenceStart) -> TokenMask | None:
        """The constraints of a sequence that starts; None: it has none."""
        constraints = start.constraints
        if constraints is None:
            return None
        matcher = None
        if constraints.grammar:
            assert self._compiler is not None, "the front refuses grammars without a tokenizer"
            matcher = self._compiler.start_grammar(constraints.grammar)
        return TokenMask(start, constraints, self._vocab_size, matcher)

    def collect_masks(self, masks: Sequence[TokenMask | None]) -> tuple[TokenMasks | None, dict[int, str]]:
        """The masks of a batch's rows, in host memory, and for each row that cannot go on the reason.

        A row that cannot go on is not masked, since its token is dropped. None: no row is masked.
        """
        if self._compiler is not None:
            self._compiler.compute_masks([mask.matcher for mask in masks if mask is not None and mask.matcher])
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
