"""Grammars, compiled over a vocabulary, and the matchers that follow them. This is foreign code: it may run for long,
need much memory or crash, so it belongs into a sandbox."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardline.structured.grammar import parser_limits
from shardline.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers
    from llguidance import LLMatcher

_MAX_WARM_CHARS = 4 << 20
"""Length of all grammars whose compiled form is kept."""
_MAX_SHOWN_CHARS = 300


class GrammarCompiler:
    """Compiles grammars, and keeps those that were used last."""

    def __init__(self, tokenizer: bytes | tokenizers.Tokenizer) -> None:
        """`tokenizer`: the model's, or the content of its tokenizer.json.

        Raises:
            ValueError: the tokenizer cannot be used with grammars.
        """
        try:
            self._vocabulary = Vocabulary(tokenizer)
        except Exception as error:  # llguidance and tokenizers raise plain exceptions
            raise ValueError(f"the model's tokenizer cannot be used with grammars: {error}") from error
        self._warm: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_chars = 0

    def start_grammar(self, grammar: str) -> Matcher:
        """A matcher at the beginning of `grammar`. One that cannot be compiled is an error of the first mask."""
        compiled = self._warm.get(grammar)
        if compiled is None:
            compiled = self._warm[grammar] = self._compile(grammar)
            self._num_chars += len(grammar)
            while self._num_chars > _MAX_WARM_CHARS:
                self._num_chars -= len(self._warm.popitem(last=False)[0])
        else:
            self._warm.move_to_end(grammar)
        return Matcher(compiled.deep_copy(), self._vocabulary)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            # The first mask builds tables that all copies share.
            matcher.deep_copy().compute_bitmask()
        return matcher


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def append_token(self, token_id: int, *, is_end: bool) -> None:
        """Note the next token; `is_end`: it ends the answer."""
        if not (self._matcher.is_stopped() or self._matcher.is_error()):
            self._matcher.consume_tokens([self._vocabulary.end_id if is_end else token_id])

    def take_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise AssertionError(f"the grammar does not go back: {self._matcher.get_error()}")

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def find_allowed(self) -> tuple[npt.NDArray[np.int32], bool]:
        """The tokens that may come next, as bits, and whether the answer may end here.

        Raises:
            ValueError: the grammar cannot be compiled, or is too complex to go on.
        """
        words = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())
            raise ValueError(f"the grammar cannot be followed: {reason[:_MAX_SHOWN_CHARS]}")
        end = self._vocabulary.end_id
        may_end = bool(words[end >> 5] >> (end & 31) & 1)
        words[end >> 5] &= ~np.int32(np.uint32(1 << (end & 31)).view(np.int32))
        return words, may_end
